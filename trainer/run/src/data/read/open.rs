//! Opens a file of text or records, which may be compressed with gzip.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read};
use std::rc::Rc;

use flate2::read::MultiGzDecoder;

use super::SourceFile;
use super::ending::is_gzip;

/// The text of a file, and the bytes read from the file so far, which are fewer than those of the text if it is
/// compressed.
type OpenText = (Box<dyn Read>, Rc<Cell<u64>>);

/// Opens the file of `source` for reading its text.
pub(super) fn open(source: &SourceFile) -> io::Result<OpenText> {
    let bytes = Rc::new(Cell::new(0));
    let file = CountingReader {
        file: File::open(&source.path)?,
        bytes: bytes.clone(),
    };
    let reader: Box<dyn Read> = match is_gzip(&source.path) {
        true => Box::new(MultiGzDecoder::new(file)),
        false => Box::new(file),
    };
    Ok((reader, bytes))
}

struct CountingReader {
    file: File,
    bytes: Rc<Cell<u64>>,
}

impl Read for CountingReader {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(to)?;
        self.bytes.set(self.bytes.get() + read as u64);
        Ok(read)
    }
}
