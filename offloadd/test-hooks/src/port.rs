//! TCP ports for tests that run at the same time.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;

use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};

/// A port of 127.0.0.1 that the kernel gives to nobody else while this lives. A program that is told its number can listen
/// there, as listeners set `SO_REUSEADDR`.
#[derive(Debug)]
pub struct ReservedPort {
    address: SocketAddr,
    /// Bound and not listening: another socket with `SO_REUSEADDR` may listen at the same address, and the kernel chooses the
    /// port neither for a listener at port 0 nor for a connection.
    _socket: OwnedFd,
}

impl ReservedPort {
    /// Reserves a port.
    ///
    /// # Panics
    /// No port is free.
    pub fn new() -> Self {
        let free = || -> rustix::io::Result<(SocketAddr, OwnedFd)> {
            let socket = socket(AddressFamily::INET, SocketType::STREAM, None)?;
            set_socket_reuseaddr(&socket, true)?;
            bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0))?;
            let address = SocketAddr::try_from(getsockname(&socket)?)?;
            Ok((address, socket))
        };
        let (address, _socket) =
            free().unwrap_or_else(|error| panic!("reserving a port of 127.0.0.1: {error}"));
        Self { address, _socket }
    }

    /// Returns the address with the port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the port's number.
    pub fn number(&self) -> u16 {
        self.address.port()
    }
}

impl Default for ReservedPort {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_reserved_port_can_be_listened_at_once_and_is_given_to_nobody_else() {
        let reserved = ReservedPort::new();
        let listener = TcpListener::bind(reserved.address()).unwrap();
        assert!(TcpListener::bind(reserved.address()).is_err());
        TcpStream::connect(reserved.address()).unwrap();
        drop(listener);
        // A test that starts its run again listens again.
        TcpListener::bind(reserved.address()).unwrap();
        let others: Vec<ReservedPort> = (0..100).map(|_| ReservedPort::new()).collect();
        assert!(
            (others.iter()).all(|other| other.number() != reserved.number()),
            "{}",
            reserved.number()
        );
    }
}
