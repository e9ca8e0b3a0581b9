//! Safe functions over libtorch's Gloo and its stores. May use `unsafe`.
//!
//! An [`Operation`] works on its caller's memory, which must stay until [`Operation::wait`] reports the end; `comm.rs`
//! ensures that.
#![allow(unsafe_code)]

mod ffi;
mod operation;
mod store;

use std::ffi::{CString, c_int, c_void};
use std::ptr::{self, NonNull};
use std::time::Duration;

pub(super) use operation::Operation;
pub(super) use store::Store;

use crate::ffi::take_message;
use training_ranks::{CollectiveError, World};

/// The connected ranks.
pub(super) struct Group {
    raw: NonNull<c_void>,
    world: World,
}

// SAFETY: the C++ object is not bound to a thread; Gloo's threads lock what they share.
unsafe impl Send for Group {}

impl Group {
    /// Connects this rank with all others; blocks until that is done.
    ///
    /// # Errors
    /// torch's or Gloo's error, such as a timeout.
    pub(super) fn connect(
        store: &Store,
        world: World,
        at: &Interface,
        connect: Duration,
        operation: Duration,
    ) -> Result<Group, CollectiveError> {
        let (address, interface) = match at {
            Interface::Address(address) => (text(address), None),
            Interface::Name(name) => (text(""), Some(text(name))),
        };
        let mut raw = ptr::null_mut();
        // SAFETY: the store is live and borrowed for the call; both texts end with NUL and live through it; `raw` has
        // room for a pointer.
        let message = unsafe {
            ffi::offload_gloo_connect(
                store.raw(),
                world.rank as c_int,
                world.ranks as c_int,
                address.as_ptr(),
                interface.as_ref().map_or(ptr::null(), |name| name.as_ptr()),
                milliseconds(connect),
                milliseconds(operation),
                &mut raw,
            )
        };
        // SAFETY: just returned by the shim, used only here.
        if let Some(message) = unsafe { take_message(message) } {
            return Err(CollectiveError::Rendezvous {
                op: "connecting the ranks",
                place: store.location().to_owned(),
                message: store.without_prefix(&message),
            });
        }
        Ok(Group {
            raw: NonNull::new(raw).expect("the shim made a group"),
            world,
        })
    }

    /// Starts filling `bytes` (one shard per rank, this rank's own in place) with every rank's shard.
    ///
    /// # Safety
    /// `bytes` points to `ranks * shard_bytes` bytes that nobody else touches or frees until the operation has ended.
    pub(super) unsafe fn all_gather(
        &mut self,
        bytes: *mut u8,
        shard_bytes: usize,
    ) -> Result<Operation, String> {
        let mut raw = ptr::null_mut();
        // SAFETY: the group is live; the memory is as the caller promises, and the rank is below the ranks (World).
        let message = unsafe {
            ffi::offload_gloo_all_gather(
                self.raw.as_ptr(),
                bytes,
                self.world.rank as c_int,
                self.world.ranks as c_int,
                shard_bytes,
                &mut raw,
            )
        };
        // SAFETY: both were just returned by the shim and are used only here.
        unsafe { Operation::started(message, raw) }
    }

    /// Starts sending part r of `from` to rank r, and receiving rank r's part in part r of `to`; both have `bytes`
    /// bytes in equal parts.
    ///
    /// # Safety
    /// Both point to `bytes` bytes each, a multiple of the ranks, that nobody else touches or frees until the operation has ended, and
    /// do not overlap.
    pub(super) unsafe fn all_to_all(
        &mut self,
        from: *mut u8,
        to: *mut u8,
        bytes: usize,
    ) -> Result<Operation, String> {
        let mut raw = ptr::null_mut();
        // SAFETY: the group is live; the memory is as the caller promises.
        let message =
            unsafe { ffi::offload_gloo_all_to_all(self.raw.as_ptr(), from, to, bytes, &mut raw) };
        // SAFETY: both were just returned by the shim and are used only here.
        unsafe { Operation::started(message, raw) }
    }

    /// Starts sending rank `root`'s `bytes` to all ranks.
    ///
    /// # Safety
    /// `bytes` points to `count` bytes that nobody else touches or frees until the operation has ended.
    pub(super) unsafe fn broadcast(
        &mut self,
        bytes: *mut u8,
        count: usize,
        root: u32,
    ) -> Result<Operation, String> {
        assert!(root < self.world.ranks, "there is no rank {root}");
        let mut raw = ptr::null_mut();
        // SAFETY: the group is live; the memory is as the caller promises; the root is a rank (asserted).
        let message = unsafe {
            ffi::offload_gloo_broadcast(self.raw.as_ptr(), bytes, count, root as c_int, &mut raw)
        };
        // SAFETY: both were just returned by the shim and are used only here.
        unsafe { Operation::started(message, raw) }
    }
}

impl Drop for Group {
    /// Waits for Gloo's threads, which an operation in flight may occupy until its timeout.
    fn drop(&mut self) {
        // SAFETY: owned here, and not used again.
        unsafe { ffi::offload_gloo_free(self.raw.as_ptr()) };
    }
}

/// The network interface for Gloo.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Interface {
    /// The interface with this address.
    Address(String),
    /// The interface of this name.
    Name(String),
}

fn text(text: &str) -> CString {
    // Neither environment variables nor paths contain NUL.
    CString::new(text).expect("no NUL inside")
}

fn milliseconds(time: Duration) -> c_int {
    c_int::try_from(time.as_millis()).unwrap_or(c_int::MAX)
}
