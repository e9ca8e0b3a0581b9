//! Shared memory between torch and Rust: torch's own as bytes, and foreign bytes as a tensor.
//!
//! A `Tensor` is cheaply cloned and its clones share memory, so a tensor could outlive the bytes, or both sides could
//! write at once. Each function therefore asks torch how many tensors share the memory when it must be exclusive.

use tch::{Device, Kind, Tensor};

use super::{TorchError, ffi};

/// A flat host buffer in memory that torch allocated (64-byte aligned): written as bytes, used as tensors.
pub struct HostBuffer {
    flat: Tensor,
    kind: Kind,
    elems: usize,
}

impl Default for HostBuffer {
    /// An empty buffer.
    fn default() -> Self {
        HostBuffer {
            flat: Tensor::new(),
            kind: Kind::Uint8,
            elems: 0,
        }
    }
}

impl HostBuffer {
    /// Allocates `elems` zeros.
    ///
    /// # Errors
    /// torch's error: out of memory.
    pub fn zeros(kind: Kind, elems: usize) -> Result<Self, TorchError> {
        let flat = Tensor::f_zeros([elems as i64], (kind, Device::Cpu))?;
        Ok(HostBuffer { flat, kind, elems })
    }

    /// Allocates another buffer of this kind and length.
    pub(crate) fn new_alike(&self) -> Result<Self, TorchError> {
        Self::zeros(self.kind, self.elems)
    }

    /// Number of elements.
    pub fn elems(&self) -> usize {
        self.elems
    }

    /// Bytes of one element.
    pub fn elem_bytes(&self) -> usize {
        self.kind.elt_size_in_bytes()
    }

    /// The buffer's bytes in native byte order.
    ///
    /// Panics if a tensor from [`HostBuffer::view`] is still alive: it would see the bytes change.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(!self.is_shared(), "a view of this buffer is still in use");
        let bytes = self.elems * self.kind.elt_size_in_bytes();
        if bytes == 0 {
            return &mut [];
        }
        // SAFETY: torch allocated `bytes` initialized bytes for `flat` (zeros of this kind and length, contiguous),
        // which live as long as `self`. No other tensor shares them (asserted above), and none can be created while
        // `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.flat.data_ptr().cast::<u8>(), bytes) }
    }

    /// Whether a tensor from [`HostBuffer::view`] is still alive, or a graph that saved one.
    pub fn is_shared(&self) -> bool {
        is_shared(&self.flat)
    }

    /// A tensor of `shape` that shares the buffer's memory from element `offset_elems`.
    ///
    /// # Errors
    /// torch's error: the shape does not fit into the buffer.
    pub fn view(&self, offset_elems: usize, shape: &[i64]) -> Result<Tensor, TorchError> {
        let elems: i64 = shape.iter().product();
        Ok(self
            .flat
            .f_narrow(0, offset_elems as i64, elems)?
            .f_view(shape)?)
    }
}

/// Calls `f` with a tensor over `bytes` without copying: elements of `kind`, contiguous `shape`, on the CPU.
///
/// The tensor and everything that shares its memory must be gone when `f` returns; otherwise the process is aborted,
/// since they would use memory that is no longer theirs.
///
/// # Errors
/// `bytes` does not have exactly the length of `shape`, or is not aligned to an element; an error of torch or of `f`.
pub fn with_tensor_over<R, E: From<TorchError>>(
    bytes: &mut [u8],
    kind: Kind,
    shape: &[i64],
    f: impl FnOnce(&mut Tensor) -> Result<R, E>,
) -> Result<R, E> {
    let elem_bytes = kind.elt_size_in_bytes();
    let elems = shape
        .iter()
        .map(|&n| usize::try_from(n).expect("a size is not negative"))
        .product::<usize>();
    if elems * elem_bytes != bytes.len() {
        return Err(TorchError::Length {
            elems,
            elem_bytes,
            bytes: bytes.len(),
        }
        .into());
    }
    let address = bytes.as_ptr() as usize;
    if !address.is_multiple_of(elem_bytes) {
        return Err(TorchError::Alignment {
            address,
            elem_bytes,
        }
        .into());
    }
    // SAFETY: the memory has the length and alignment checked above, is borrowed mutably for this whole call, and
    // `LentTensor` ensures that no tensor over it is left when the call ends, also by a panic. Every bit pattern is a value
    // of a numeric kind.
    let tensor = unsafe {
        Tensor::f_from_blob(
            bytes.as_mut_ptr(),
            shape,
            &contiguous(shape),
            kind,
            Device::Cpu,
        )
    };
    let mut lent = LentTensor(tensor.map_err(TorchError::from)?);
    f(&mut lent.0)
}

/// A tensor over borrowed memory; aborts the process if others still share it at the end.
struct LentTensor(Tensor);

impl Drop for LentTensor {
    fn drop(&mut self) {
        if share_count(&self.0) != 1 {
            eprintln!(
                "a tensor over borrowed memory outlived its loan: stopping before it is used"
            );
            std::process::abort();
        }
    }
}

/// Whether another tensor shares the memory of `tensor`: a clone, a view, or one saved in a graph for its backward
/// pass.
pub fn is_shared(tensor: &Tensor) -> bool {
    share_count(tensor) != 1
}

fn share_count(tensor: &Tensor) -> usize {
    // SAFETY: a live tensor with a storage (dense), borrowed for the call.
    unsafe { ffi::offload_share_count(tensor.as_ptr() as ffi::RawTensor) }
}

pub(crate) fn contiguous(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i];
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_written_are_what_a_view_shows() {
        let mut buffer = HostBuffer::zeros(Kind::Float, 8).unwrap();
        assert_eq!(buffer.elems(), 8);
        for (i, chunk) in buffer.bytes_mut().chunks_exact_mut(4).enumerate() {
            chunk.copy_from_slice(&(i as f32).to_ne_bytes());
        }
        let view = buffer.view(2, &[2, 3]).unwrap();
        assert_eq!(
            Vec::<f32>::try_from(view.flatten(0, -1)).unwrap(),
            [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
        );
        assert!(
            buffer.view(3, &[2, 3]).is_err(),
            "a view past the end is refused"
        );
    }

    #[test]
    #[should_panic(expected = "a view of this buffer is still in use")]
    fn bytes_are_refused_while_a_view_lives() {
        let mut buffer = HostBuffer::zeros(Kind::Float, 8).unwrap();
        let _view = buffer.view(0, &[8]).unwrap();
        buffer.bytes_mut();
    }

    #[test]
    fn what_a_graph_saved_shares_a_buffer_until_the_graph_is_gone() {
        let buffer = HostBuffer::zeros(Kind::Float, 8).unwrap();
        let x = Tensor::from_slice(&[1f32, 2.0]).set_requires_grad(true);
        // The tensors themselves are freed by this statement.
        let graph = &x * buffer.view(2, &[2]).unwrap().detach();
        assert!(buffer.is_shared());
        drop(graph);
        assert!(!buffer.is_shared());
    }

    #[test]
    fn a_tensor_over_bytes_writes_into_them() {
        let mut memory = [0f32; 6];
        // A view as bytes without unsafe: written through a tensor, read from the bytes.
        let mut bytes = [0u8; 24 + 4];
        let skip = (4 - bytes.as_ptr() as usize % 4) % 4;
        let aligned = &mut bytes[skip..skip + 24];
        with_tensor_over::<_, TorchError>(aligned, Kind::Float, &[2, 3], |t| {
            let row = t.get(1);
            assert_eq!(row.size(), [3]);
            drop(row);
            t.copy_(&Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]).view([2, 3]));
            Ok(())
        })
        .unwrap();
        for (value, chunk) in memory.iter_mut().zip(aligned.chunks_exact(4)) {
            *value = f32::from_ne_bytes(chunk.try_into().unwrap());
        }
        assert_eq!(memory, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    }

    #[test]
    fn a_tensor_that_outlives_its_loan_stops_the_process() {
        const ESCAPE: &str = "KERNELS_TEST_LET_A_TENSOR_ESCAPE";
        const NAME: &str = "memory::tests::a_tensor_that_outlives_its_loan_stops_the_process";
        if std::env::var_os(ESCAPE).is_some() {
            // In the child process: reaching the end of this function would be a success.
            let mut escaped = None;
            let mut bytes = HostBuffer::zeros(Kind::Float, 4).unwrap();
            let _ = with_tensor_over::<_, TorchError>(bytes.bytes_mut(), Kind::Float, &[4], |t| {
                escaped = Some(t.shallow_clone());
                Ok(())
            });
            return;
        }
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", NAME, "--nocapture"])
            .env(ESCAPE, "1")
            .output()
            .unwrap();
        assert!(!child.status.success());
        assert!(String::from_utf8_lossy(&child.stderr).contains("outlived its loan"));
    }

    #[test]
    fn a_buffer_of_another_length_or_alignment_is_refused() {
        let mut bytes = [0u8; 32];
        let base = bytes.as_ptr() as usize;
        let odd = (1..5)
            .find(|skip| !(base + skip).is_multiple_of(4))
            .unwrap();
        let run = |bytes: &mut [u8]| {
            with_tensor_over::<_, TorchError>(bytes, Kind::Float, &[4], |_| Ok(()))
        };
        assert!(matches!(
            run(&mut bytes[..20]),
            Err(TorchError::Length {
                elems: 4,
                elem_bytes: 4,
                bytes: 20
            })
        ));
        assert!(matches!(
            run(&mut bytes[odd..odd + 16]),
            Err(TorchError::Alignment { elem_bytes: 4, .. })
        ));
    }
}
