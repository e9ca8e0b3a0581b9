//! Views of bytes as numbers. One of the files that may use `unsafe`.
//!
//! A view exists only where length and alignment fit. Tiles are little endian, as is every supported machine (checked
//! below), so bytes are never swapped.
#![allow(unsafe_code)]

const _: () = assert!(cfg!(target_endian = "little"), "tiles are little endian");

/// Numbers for which every bit pattern is a value.
///
/// # Safety
/// The type has no padding, no invalid bit pattern, no pointer and no interior mutability.
pub unsafe trait Plain: Copy + Send + Sync {}

// SAFETY: integers and floats have only valid bit patterns and no padding.
unsafe impl Plain for u16 {}
// SAFETY: as for u16.
unsafe impl Plain for i16 {}
// SAFETY: as for u16.
unsafe impl Plain for f32 {}

/// Views `bytes` as numbers.
///
/// Panics if the length is not a multiple of the number's size or the start is not aligned.
pub fn view<T: Plain>(bytes: &[u8]) -> &[T] {
    let count = checked_count::<T>(bytes);
    // SAFETY: checked_count verified the alignment and that `count` numbers fill the slice; Plain makes every bit
    // pattern a valid T; the lifetime and the shared borrow are those of `bytes`.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast::<T>(), count) }
}

/// Views `bytes` as numbers to write. Panics like [`view`].
pub fn view_mut<T: Plain>(bytes: &mut [u8]) -> &mut [T] {
    let count = checked_count::<T>(bytes);
    // SAFETY: as in view; the borrow is exclusive, and every T leaves valid bytes behind.
    unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast::<T>(), count) }
}

fn checked_count<T: Plain>(bytes: &[u8]) -> usize {
    let size = size_of::<T>();
    assert!(
        bytes.len().is_multiple_of(size),
        "{} bytes are no whole count of {size}-byte elements",
        bytes.len()
    );
    assert!(
        bytes.as_ptr().addr().is_multiple_of(align_of::<T>()),
        "elements of {size} bytes start at address {:#x}, which is not aligned to them",
        bytes.as_ptr().addr()
    );
    bytes.len() / size
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(8))]
    struct AlignedArray([u8; 16]);

    #[test]
    fn a_view_shows_the_little_endian_numbers() {
        let mut memory = AlignedArray([0; 16]);
        view_mut::<u16>(&mut memory.0)[1] = 0x1234;
        assert_eq!(memory.0[2..4], [0x34, 0x12]);
        assert_eq!(view::<u16>(&memory.0[2..4]), [0x1234]);
    }

    #[test]
    #[should_panic(expected = "not aligned")]
    fn a_misaligned_view_is_refused() {
        let memory = AlignedArray([0; 16]);
        view::<f32>(&memory.0[2..6]);
    }

    #[test]
    #[should_panic(expected = "no whole count")]
    fn a_view_of_part_of_a_number_is_refused() {
        let memory = AlignedArray([0; 16]);
        view::<f32>(&memory.0[..6]);
    }
}
