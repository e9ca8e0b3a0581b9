//! File systems that keep their files in memory, by the magic number of `statfs`.

/// Returns the name of a file system whose files do not survive a restart of the machine; `None` for others.
pub fn in_memory(magic: u64) -> Option<&'static str> {
    // The number may be sign-extended from 32 bits.
    match magic & 0xffff_ffff {
        0x0102_1994 => Some("tmpfs"),
        0x8584_58f6 => Some("ramfs"),
        _ => None,
    }
}
