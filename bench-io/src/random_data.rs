//! Incompressible bytes, the same in every run.

pub(crate) fn fill(bytes: &mut [u8], seed: u64) {
    // xorshift stays at 0.
    let mut state = seed | 1;
    for word in bytes.chunks_mut(8) {
        state = next(state);
        word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
    }
}

/// The xorshift64 successor of `state`, which is not 0.
pub(crate) fn next(mut state: u64) -> u64 {
    state ^= state << 13;
    state ^= state >> 7;
    state ^ (state << 17)
}
