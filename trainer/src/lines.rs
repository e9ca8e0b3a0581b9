//! Host bytes that start at a cache line, as the kernels on the processor want them.

/// Zeroed at first.
pub(crate) struct Lines {
    lines: Vec<[u8; LINE_BYTES]>,
    bytes: usize,
}

const LINE_BYTES: usize = 64;

impl Lines {
    /// So many bytes.
    pub(crate) fn new(bytes: usize) -> Self {
        Self {
            lines: vec![[0; LINE_BYTES]; bytes.div_ceil(LINE_BYTES) + 1],
            bytes,
        }
    }

    /// All of them.
    pub(crate) fn bytes(&self) -> &[u8] {
        let all = self.lines.as_flattened();
        let start = all.as_ptr().align_offset(LINE_BYTES);
        &all[start..start + self.bytes]
    }

    /// All of them, to be written.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let all = self.lines.as_flattened_mut();
        let start = all.as_ptr().align_offset(LINE_BYTES);
        &mut all[start..start + self.bytes]
    }
}
