//! Tests of the stored format, which later versions must still read.

use super::super::tokenize::{BEGINS, NOT_COUNTED};
use super::*;

/// A file of 16-bit elements with a mask, three for training and two for validation.
#[test]
fn the_stored_format_has_not_changed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.tokens");
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path)
        .unwrap();
    let header = Header {
        key: 0x1122_3344_5566_7788,
        elem_bytes: elem_bytes(16384),
        ..Header::default()
    };
    let mut writer = TokenFileWriter::new(&file, &path, header).unwrap();
    writer.document();
    writer.divided();
    writer.unanswered();
    writer.padding(2);
    writer.train(&[1 | BEGINS, 2 | NOT_COUNTED]).unwrap();
    writer.hold(&[16383, 5]).unwrap();
    writer.train(&[7]).unwrap();
    writer.finish(0).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(&bytes[..16], b"TOKENS\r\n\x04\0\0\0\0\0\0\0");
    assert_eq!(&bytes[16..24], 0x1122_3344_5566_7788u64.to_le_bytes());
    let word = |at: usize| u64::from_le_bytes(bytes[8 * at..8 * at + 8].try_into().unwrap());
    assert_eq!(
        [3, 4, 5, 6, 7, 9, 11, 12].map(word),
        [2, 1, 3, 2, 1, 4, 2, 1]
    );
    assert_eq!(&bytes[128..130], b"{}", "no findings");
    assert_eq!(word(14), 2 | u64::from(crc32c::crc32c(b"{}")) << 32);
    assert!(bytes[130..4096].iter().all(|byte| *byte == 0));
    let elements = [1, 0x40, 2, 0x80, 7, 0, 0xFF, 0x3F, 5, 0];
    assert_eq!(&bytes[4096..4106], elements);
    assert_eq!(&bytes[4106..], crc32c::crc32c(&elements).to_le_bytes());
    let stored = TokenFile::open(&path, 0x1122_3344_5566_7788)
        .unwrap()
        .unwrap();
    let mut found = Vec::new();
    stored.read(1, 3, &mut found).unwrap();
    assert_eq!(found, [2 | NOT_COUNTED, 7, 16383]);
    assert!(
        TokenFile::open(&path, 1).is_err(),
        "a file with another key"
    );
    assert!(
        TokenFile::open(&dir.path().join("none"), 1)
            .unwrap()
            .is_none()
    );
}

#[test]
fn elements_are_as_wide_as_their_ids_need() {
    let widths = [256, 16384, 16385, 65536].map(elem_bytes);
    assert_eq!(widths, [2, 2, 4, 4]);
}

#[test]
fn ranges_over_blocks_give_what_was_written() {
    for width in [2, 4] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.tokens");
        let file = std::fs::File::create(&path).unwrap();
        let header = Header {
            elem_bytes: width,
            ..Header::default()
        };
        let mask = |i: u32| match i % 5 {
            0 => NOT_COUNTED,
            1 => BEGINS,
            2 => NOT_COUNTED | BEGINS,
            _ => 0,
        };
        let elements: Vec<u32> = (0..200_000u32).map(|i| (i % 120) | mask(i)).collect();
        let mut writer = TokenFileWriter::new(&file, &path, header).unwrap();
        for part in elements[..150_000].chunks(777) {
            writer.train(part).unwrap();
        }
        writer.hold(&elements[150_000..]).unwrap();
        let header = writer.finish(10).unwrap();
        assert_eq!((header.train_elems, header.held_elems), (149_990, 50_010));
        let stored = TokenFile::open(&path, 0).unwrap().unwrap();
        let mut gone = 0;
        stored.verify(&mut |bytes| gone += bytes).unwrap();
        assert_eq!(gone, 200_000 * width as u64);
        for (first, count) in [
            (0, 200_000),
            (65_530, 20),
            (16_383, 2),
            (199_999, 1),
            (5, 0),
        ] {
            let mut found = Vec::new();
            stored.read(first as u64, count, &mut found).unwrap();
            assert_eq!(found, elements[first..first + count], "{first} {count}");
        }
    }
}
