//! Declarations of the C functions of shim.cpp. Callers in the neighbouring files uphold their requirements.

use std::ffi::{CStr, c_char, c_int, c_void};

use super::{TorchError, first_line};

/// `at::Tensor *`, the same pointer as `tch::Tensor::as_ptr`.
pub(crate) type RawTensor = *mut c_void;

unsafe extern "C" {
    /// Fills `results` (`input_count` elements) with new tensors. Returns NULL, or a message to free.
    pub(crate) fn offload_vjp(
        outputs: *const RawTensor,
        grad_outputs: *const RawTensor,
        output_count: usize,
        inputs: *const RawTensor,
        input_count: usize,
        results: *mut RawTensor,
    ) -> *mut c_char;

    /// Computes causal attention within documents, on a GPU. A `window` of 0 stands for none.
    pub(crate) fn offload_attention_of_documents(
        query: RawTensor,
        key: RawTensor,
        value: RawTensor,
        bounds: RawTensor,
        longest: i64,
        window: i64,
        result: *mut RawTensor,
    ) -> *mut c_char;

    /// Brings the singular values of a matrix near 1, in bf16. `coefficients` are three.
    pub(crate) fn offload_orthogonal(
        matrix: RawTensor,
        coefficients: *const f64,
        eps: f64,
        steps: u64,
        result: *mut RawTensor,
    ) -> *mut c_char;

    /// Number of tensors that share the memory of `tensor`, itself included: clones and views.
    pub(crate) fn offload_share_count(tensor: RawTensor) -> usize;

    pub(crate) fn offload_set_deterministic(on: c_int) -> *mut c_char;

    pub(crate) fn offload_set_threads(count: c_int) -> *mut c_char;

    /// Flushes C's buffers and ends the process without static destructors and `atexit` functions.
    pub(crate) fn offload_exit(status: c_int) -> !;

    /// Makes GPU number `index` current on the calling thread, and sets torch to plain IEEE products on it.
    pub(crate) fn offload_use_gpu(index: c_int) -> *mut c_char;

    /// Most bytes that torch had allocated, and reserved, since the last reset.
    pub(crate) fn offload_gpu_memory(
        index: c_int,
        allocated_peak: *mut u64,
        reserved_peak: *mut u64,
        reset: c_int,
    ) -> *mut c_char;

    /// Creates a tensor over device memory; freeing its storage calls `release(owner)` on any thread. After an error it
    /// is never called.
    pub(crate) fn offload_gpu_tensor(
        address: *mut c_void,
        scalar_type: c_int,
        sizes: *const i64,
        strides: *const i64,
        dims: usize,
        index: c_int,
        owner: *mut c_void,
        release: extern "C" fn(*mut c_void),
        result: *mut RawTensor,
    ) -> *mut c_char;

    fn offload_free_message(message: *mut c_char);
}

/// Turns a shim's message into an error and frees it.
///
/// # Safety
/// `message` is NULL, or a shim function has just returned it and it is used nowhere else.
pub(crate) unsafe fn check(op: &'static str, message: *mut c_char) -> Result<(), TorchError> {
    // SAFETY: the caller's promise is the same.
    match unsafe { take_message(message) } {
        None => Ok(()),
        Some(message) => Err(TorchError::Torch { op, message }),
    }
}

/// Takes the first line of a shim's message and frees the message; `None` for NULL.
///
/// # Safety
/// `message` is NULL, or a shim function has just returned it and it is used nowhere else.
pub(crate) unsafe fn take_message(message: *mut c_char) -> Option<String> {
    if message.is_null() {
        return None;
    }
    // SAFETY: not NULL, and the shim returns NUL-terminated text (the caller's promise).
    let text = unsafe { CStr::from_ptr(message) }
        .to_string_lossy()
        .into_owned();
    // SAFETY: the shim allocated it, nobody else has it (the caller's promise), and `text` is a copy.
    unsafe { offload_free_message(message) };
    Some(first_line(&text))
}
