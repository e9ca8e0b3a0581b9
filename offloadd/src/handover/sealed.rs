//! The state as a sealed memory file: magic, versions and checksum, then the message.
//!
//! Both versions stand in front, and a state with another version is refused; the sessions then end as they would without a
//! hand-over. Most releases have the same versions.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use offload_api::PROTOCOL_VERSION;
use offload_api::checksum::checksum;
use prost::Message;
use rustix::fs::SealFlags;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::message::HandoverState;
use crate::arena::memory_file;

const MAGIC: [u8; 8] = *b"OFFLNEXT";

/// Version of the message, raised when a field changes its meaning.
///
/// 1. The first one.
/// 2. Each hand-over has a number of its own, and is claimed last.
/// 3. It says which daemon has served since, so that an old one is refused.
/// 4. Devices have the store's numbers.
const VERSION: u32 = 4;

/// Largest plausible size.
const BYTES_MAX: u64 = 4 << 30;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct MessageHead {
    magic: [u8; 8],
    version: u32,
    /// Version of the rings and calls of the sessions.
    protocol_version: u32,
    /// Length of the message.
    bytes: u64,
    /// Checksum of the message.
    checksum: u32,
    reserved: u32,
}

const _: () = assert!(size_of::<MessageHead>() == 32);

/// Why a state that was handed over is not adopted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct HandoverRefusal(pub String);

/// Writes the state to a sealed memory file.
///
/// # Errors
/// The system's errors.
pub fn seal(state: &HandoverState) -> io::Result<OwnedFd> {
    let message = state.encode_to_vec();
    let head = MessageHead {
        magic: MAGIC,
        version: VERSION,
        protocol_version: PROTOCOL_VERSION,
        bytes: message.len() as u64,
        checksum: checksum(&message),
        reserved: 0,
    };
    let file = File::from(memory_file("offloadd-state")?);
    file.write_all_at(head.as_bytes(), 0)?;
    file.write_all_at(&message, size_of::<MessageHead>() as u64)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file.into())
}

/// Reads a state written by [`seal`].
///
/// # Errors
/// [`HandoverRefusal`] for anything else.
pub fn open(fd: impl AsFd) -> Result<HandoverState, HandoverRefusal> {
    let refuse = |what: String| Err(HandoverRefusal(what));
    let failed = |error: io::Error| HandoverRefusal(format!("cannot read it: {error}"));
    let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|e| failed(e.into()))?;
    if !seals.contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE) {
        return refuse("it is not sealed, so it may still change".into());
    }
    let file = File::from(fd.as_fd().try_clone_to_owned().map_err(failed)?);
    let found_bytes = file.metadata().map_err(failed)?.len();
    let head_bytes = size_of::<MessageHead>() as u64;
    if !(head_bytes..=BYTES_MAX).contains(&found_bytes) {
        return refuse(format!("it has {found_bytes} bytes"));
    }
    let mut bytes = vec![0; found_bytes as usize];
    file.read_exact_at(&mut bytes, 0).map_err(failed)?;
    let (head, message) = MessageHead::ref_from_prefix(&bytes).expect("at least a head");
    if head.magic != MAGIC || head.reserved != 0 {
        return refuse("it does not begin like a daemon's state".into());
    }
    if (head.version, head.protocol_version) != (VERSION, PROTOCOL_VERSION) {
        return refuse(format!(
            "it has version {} for protocol version {}, this daemon knows {VERSION} for {PROTOCOL_VERSION}: sessions do not \
             outlive this upgrade",
            head.version, head.protocol_version
        ));
    }
    if head.bytes != message.len() as u64 {
        return refuse(format!(
            "it says {} bytes and has {}",
            head.bytes,
            message.len()
        ));
    }
    let found = checksum(message);
    if head.checksum != found {
        return refuse(format!(
            "its checksum is {found:08x}, it says {:08x}: it is damaged",
            head.checksum
        ));
    }
    HandoverState::decode(message).or_else(|error| refuse(format!("it is malformed: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handover::message::{HandoverJob, HandoverSession};

    fn state() -> HandoverState {
        HandoverState {
            store: vec![7; 16],
            epoch: 9,
            jobs: vec![HandoverJob {
                uid: 1000,
                name: "tried".into(),
                ..HandoverJob::default()
            }],
            sessions: vec![HandoverSession {
                token: vec![1; 16],
                ..HandoverSession::default()
            }],
            handover: 3,
            catalog: 5,
            catalog_unsure: true,
        }
    }

    /// A sealed file of these bytes.
    fn file(bytes: &[u8]) -> OwnedFd {
        let file = File::from(memory_file("tried").unwrap());
        file.write_all_at(bytes, 0).unwrap();
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals).unwrap();
        file.into()
    }

    fn bytes() -> Vec<u8> {
        let file = File::from(seal(&state()).unwrap());
        let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    #[test]
    fn a_state_comes_back_as_it_was() {
        assert_eq!(open(seal(&state()).unwrap()), Ok(state()));
    }

    #[test]
    fn any_changed_byte_and_any_other_length_is_refused() {
        let whole = bytes();
        assert_eq!(open(file(&whole)), Ok(state()));
        for at in 0..whole.len() {
            for bit in 0..8 {
                let mut changed = whole.clone();
                changed[at] ^= 1 << bit;
                assert!(open(file(&changed)).is_err(), "byte {at}, bit {bit}");
            }
        }
        for length in 0..whole.len() {
            assert!(open(file(&whole[..length])).is_err(), "{length} bytes");
        }
        let longer = [&whole[..], &[0]].concat();
        assert!(open(file(&longer)).unwrap_err().0.contains("says"));
    }

    #[test]
    fn another_version_is_named_and_an_open_file_is_not_believed() {
        let mut newer = bytes();
        newer[8] = 77;
        let words = open(file(&newer)).unwrap_err().0;
        assert!(words.contains("version 77"), "{words}");
        let unsealed = File::from(memory_file("tried").unwrap());
        unsealed.write_all_at(&bytes(), 0).unwrap();
        assert!(open(&unsealed).unwrap_err().0.contains("not sealed"));
        let pipe = std::io::pipe().unwrap().0;
        assert!(open(&pipe).unwrap_err().0.contains("cannot read it"));
    }
}
