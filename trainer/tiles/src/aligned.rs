//! Host memory aligned to a cache line, as the kernels on the processor require.

const LINE_BYTES: usize = 64;

/// Zeroed bytes that start at a cache line.
pub struct AlignedBytes {
    lines: Vec<[u8; LINE_BYTES]>,
    bytes: usize,
}

impl AlignedBytes {
    pub fn new(bytes: usize) -> Self {
        Self {
            lines: vec![[0; LINE_BYTES]; bytes.div_ceil(LINE_BYTES) + 1],
            bytes,
        }
    }

    pub fn bytes(&self) -> &[u8] {
        let all = self.lines.as_flattened();
        let start = all.as_ptr().align_offset(LINE_BYTES);
        &all[start..start + self.bytes]
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let all = self.lines.as_flattened_mut();
        let start = all.as_ptr().align_offset(LINE_BYTES);
        &mut all[start..start + self.bytes]
    }
}
