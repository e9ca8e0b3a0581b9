//! c10d's stores: small named values shared by all ranks.

use std::ffi::{c_char, c_int, c_void};
use std::net::TcpListener;
use std::os::fd::IntoRawFd;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::time::Duration;

use super::{ffi, milliseconds, text};
use crate::ffi::take_message;
use training_ranks::CollectiveError;

/// Small named values shared by all ranks.
pub(in crate::collective) struct Store {
    raw: NonNull<c_void>,
    place: String,
    /// Prefix of all keys, which messages must not show: it contains the job token.
    prefix: String,
}

// SAFETY: c10d's stores lock what they share and are not bound to a thread.
unsafe impl Send for Store {}

impl Store {
    /// Opens a store in the file `name` of `dir`, for ranks of one node.
    ///
    /// # Errors
    /// torch's error.
    pub(in crate::collective) fn in_dir(
        dir: &Path,
        name: &str,
        ranks: u32,
        timeout: Duration,
    ) -> Result<Store, CollectiveError> {
        let place = dir.display().to_string();
        let path = dir.join(name);
        let Some(path) = path.to_str() else {
            return Err(failed("opening the store", &place, "the path is not UTF-8"));
        };
        Store::made(place, "", |raw| {
            let path = text(path);
            // SAFETY: the text ends with NUL and lives through the call; `raw` has room for a pointer.
            unsafe {
                ffi::offload_store_dir(path.as_ptr(), ranks as c_int, milliseconds(timeout), raw)
            }
        })
    }

    /// Opens a store at a TCP address: served here on `listener`, or elsewhere.
    ///
    /// # Errors
    /// torch's error, such as no answer within `timeout`.
    pub(in crate::collective) fn over_tcp(
        host: &str,
        port: u16,
        listener: Option<TcpListener>,
        prefix: &str,
        timeout: Duration,
    ) -> Result<Store, CollectiveError> {
        let listen_fd = listener.map_or(-1, TcpListener::into_raw_fd);
        let (place, secret) = (format!("{host}:{port}"), prefix);
        Store::made(place, secret, |raw| {
            let (host, prefix) = (text(host), text(prefix));
            // SAFETY: the texts end with NUL and live through the call; the socket now belongs to the store; `raw` has
            // room for a pointer.
            unsafe {
                ffi::offload_store_tcp(
                    host.as_ptr(),
                    c_int::from(port),
                    listen_fd,
                    milliseconds(timeout),
                    prefix.as_ptr(),
                    raw,
                )
            }
        })
    }

    fn made(
        place: String,
        prefix: &str,
        make: impl FnOnce(*mut *mut c_void) -> *mut c_char,
    ) -> Result<Store, CollectiveError> {
        let mut raw = ptr::null_mut();
        let message = make(&mut raw);
        // SAFETY: just returned by the shim, used only here.
        if let Some(message) = unsafe { take_message(message) } {
            return Err(failed(
                "opening the store",
                &place,
                &without(&message, prefix),
            ));
        }
        Ok(Store {
            raw: NonNull::new(raw).expect("the shim made a store"),
            place,
            prefix: prefix.to_owned(),
        })
    }

    /// Directory, or host and port.
    pub(in crate::collective) fn location(&self) -> &str {
        &self.place
    }

    /// A message of torch without the prefix of the keys, which contains the job token.
    pub(super) fn without_prefix(&self, message: &str) -> String {
        without(message, &self.prefix)
    }

    /// Sets the value of `key`.
    ///
    /// # Errors
    /// The store is gone.
    pub(in crate::collective) fn set(
        &self,
        key: &str,
        bytes: &[u8],
    ) -> Result<(), CollectiveError> {
        let key = text(key);
        // SAFETY: the store is live; key and bytes live through the call.
        let message = unsafe {
            ffi::offload_store_set(self.raw.as_ptr(), key.as_ptr(), bytes.as_ptr(), bytes.len())
        };
        self.check("writing to the store", message)
    }

    /// Copies the value of `key` into `bytes` as far as it fits; returns its length, or `None` without such a key.
    ///
    /// # Errors
    /// The store is gone.
    pub(in crate::collective) fn get(
        &self,
        key: &str,
        bytes: &mut [u8],
    ) -> Result<Option<usize>, CollectiveError> {
        let key = text(key);
        let mut count = 0;
        // SAFETY: the store is live; the key lives through the call; `bytes` has the stated length.
        let message = unsafe {
            ffi::offload_store_get(
                self.raw.as_ptr(),
                key.as_ptr(),
                bytes.as_mut_ptr(),
                bytes.len(),
                &mut count,
            )
        };
        self.check("reading from the store", message)?;
        Ok((count != usize::MAX).then_some(count))
    }

    /// Adds `amount` to the number of `key` (0 without one) and returns the sum.
    ///
    /// # Errors
    /// The store is gone.
    pub(in crate::collective) fn add(
        &self,
        key: &str,
        amount: i64,
    ) -> Result<i64, CollectiveError> {
        let key = text(key);
        let mut sum = 0;
        // SAFETY: the store is live; the key lives through the call; `sum` has room for the result.
        let message =
            unsafe { ffi::offload_store_add(self.raw.as_ptr(), key.as_ptr(), amount, &mut sum) };
        self.check("counting in the store", message)?;
        Ok(sum)
    }

    pub(super) fn raw(&self) -> *mut c_void {
        self.raw.as_ptr()
    }

    fn check(&self, op: &'static str, message: *mut c_char) -> Result<(), CollectiveError> {
        // SAFETY: just returned by the shim (the callers are in this file), used only here.
        match unsafe { take_message(message) } {
            None => Ok(()),
            Some(message) => Err(failed(op, &self.place, &self.without_prefix(&message))),
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: owned here, and not used again; a group keeps its own reference.
        unsafe { ffi::offload_store_free(self.raw.as_ptr()) };
    }
}

fn without(message: &str, prefix: &str) -> String {
    if prefix.is_empty() {
        message.to_owned()
    } else {
        message.replace(prefix, "...")
    }
}

fn failed(op: &'static str, place: &str, message: &str) -> CollectiveError {
    CollectiveError::Rendezvous {
        op,
        place: place.to_owned(),
        message: message.to_owned(),
    }
}
