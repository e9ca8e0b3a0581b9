//! Declarations of the C functions of shim.cpp. Callers in the neighbouring files uphold their requirements.

use std::ffi::{c_char, c_int, c_longlong, c_void};

unsafe extern "C" {
    pub(super) fn offload_store_dir(
        path: *const c_char,
        ranks: c_int,
        timeout_ms: c_int,
        store: *mut *mut c_void,
    ) -> *mut c_char;

    /// Takes over `listen_fd`; without a listening socket (-1) it connects as a client.
    pub(super) fn offload_store_tcp(
        host: *const c_char,
        port: c_int,
        listen_fd: c_int,
        timeout_ms: c_int,
        prefix: *const c_char,
        store: *mut *mut c_void,
    ) -> *mut c_char;

    pub(super) fn offload_store_set(
        store: *mut c_void,
        key: *const c_char,
        bytes: *const u8,
        count: usize,
    ) -> *mut c_char;

    /// Copies at most `room` bytes; `count` becomes the length of the value, or `usize::MAX` without such a key.
    pub(super) fn offload_store_get(
        store: *mut c_void,
        key: *const c_char,
        bytes: *mut u8,
        room: usize,
        count: *mut usize,
    ) -> *mut c_char;

    pub(super) fn offload_store_add(
        store: *mut c_void,
        key: *const c_char,
        amount: c_longlong,
        sum: *mut c_longlong,
    ) -> *mut c_char;

    pub(super) fn offload_store_free(store: *mut c_void);

    pub(super) fn offload_gloo_connect(
        store: *mut c_void,
        rank: c_int,
        ranks: c_int,
        address: *const c_char,
        interface: *const c_char,
        connect_ms: c_int,
        operation_ms: c_int,
        group: *mut *mut c_void,
    ) -> *mut c_char;

    /// The operation uses `bytes` until it has ended.
    pub(super) fn offload_gloo_all_gather(
        group: *mut c_void,
        bytes: *mut u8,
        rank: c_int,
        ranks: c_int,
        shard_bytes: usize,
        op: *mut *mut c_void,
    ) -> *mut c_char;

    /// The operation uses both until it has ended.
    pub(super) fn offload_gloo_all_to_all(
        group: *mut c_void,
        from: *mut u8,
        to: *mut u8,
        bytes: usize,
        op: *mut *mut c_void,
    ) -> *mut c_char;

    /// The operation uses `bytes` until it has ended.
    pub(super) fn offload_gloo_broadcast(
        group: *mut c_void,
        bytes: *mut u8,
        count: usize,
        root: c_int,
        op: *mut *mut c_void,
    ) -> *mut c_char;

    pub(super) fn offload_gloo_wait(
        op: *mut c_void,
        wait_ms: c_int,
        done: *mut c_int,
    ) -> *mut c_char;

    pub(super) fn offload_gloo_operation_free(op: *mut c_void);

    pub(super) fn offload_gloo_free(group: *mut c_void);
}
