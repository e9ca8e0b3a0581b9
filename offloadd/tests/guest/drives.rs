//! Drives in this process's memory, served to QEMU as NBD exports. One log holds all their writes and flushes in the order in which they were
//! answered, and the guest's messages between them.
//!
//! A request is answered before the next one of its drive is read, so no request is ever half done. Bytes written to a drive since its last flush are
//! in its volatile cache, and a power cut may keep any of their sectors.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// One event of the log.
#[derive(Clone, Debug)]
pub(crate) enum Entry {
    Write {
        drive: usize,
        offset: u64,
        bytes: Vec<u8>,
    },
    Flush {
        drive: usize,
    },
    /// The guest reported that this generation is committed.
    Acknowledged(u64),
}

/// The contents of all drives when the guest started, and the events since.
pub(crate) struct Drives {
    pub(crate) base: Vec<Vec<u8>>,
    pub(crate) log: Arc<Mutex<Vec<Entry>>>,
    pub(crate) sockets: Vec<PathBuf>,
}

impl Drives {
    /// Serves drives with these contents on sockets in `dir`, as long as QEMU is connected.
    pub(crate) fn serve(dir: &Path, base: Vec<Vec<u8>>) -> Self {
        let log = Arc::new(Mutex::new(Vec::new()));
        let sockets = (base.iter().enumerate()).map(|(drive, bytes)| {
            let path = dir.join(format!("drive{drive}"));
            let listener = UnixListener::bind(&path).unwrap();
            let (mut live, log) = (bytes.clone(), log.clone());
            std::thread::spawn(move || {
                let (stream, _) = listener.accept().unwrap();
                // The thread ends when QEMU does.
                let _ = serve(stream, drive, &mut live, &log);
            });
            path
        });
        let sockets = sockets.collect();
        Self { base, log, sockets }
    }
}

const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const REPLY_UNSUPPORTED: u32 = (1 << 31) + 1;
/// The export has flags, and supports flushes.
const EXPORT_FLAGS: u16 = 1 | 4;

fn number<const BYTES: usize>(stream: &mut UnixStream) -> std::io::Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Does the fixed newstyle handshake, as far as QEMU needs it.
fn shake_hands(stream: &mut UnixStream, bytes: u64) -> std::io::Result<()> {
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
    number::<4>(stream)?;
    loop {
        number::<8>(stream)?;
        let option = u32::from_be_bytes(number(stream)?);
        let length = u32::from_be_bytes(number(stream)?);
        std::io::copy(&mut stream.take(u64::from(length)), &mut std::io::sink())?;
        let mut reply = |kind: u32, data: &[u8]| {
            let mut bytes = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
            bytes.extend(option.to_be_bytes());
            bytes.extend(kind.to_be_bytes());
            bytes.extend((data.len() as u32).to_be_bytes());
            bytes.extend(data);
            stream.write_all(&bytes)
        };
        if option != OPTION_GO {
            reply(REPLY_UNSUPPORTED, &[])?;
            continue;
        }
        let export = [
            &[0, 0],
            &bytes.to_be_bytes()[..],
            &EXPORT_FLAGS.to_be_bytes(),
        ]
        .concat();
        reply(REPLY_INFO, &export)?;
        return reply(REPLY_ACK, &[]);
    }
}

fn serve(
    mut stream: UnixStream,
    drive: usize,
    live: &mut [u8],
    log: &Mutex<Vec<Entry>>,
) -> std::io::Result<()> {
    shake_hands(&mut stream, live.len() as u64)?;
    loop {
        assert_eq!(u32::from_be_bytes(number(&mut stream)?), REQUEST_MAGIC);
        let [_, _, _, kind] = number::<4>(&mut stream)?;
        let handle = number::<8>(&mut stream)?;
        let offset = u64::from_be_bytes(number(&mut stream)?);
        let length = u32::from_be_bytes(number(&mut stream)?) as usize;
        let range = offset as usize..offset as usize + length;
        let mut answer = Vec::new();
        let mut errno: u32 = 0;
        match kind {
            0 => answer = live[range].to_vec(),
            1 => {
                stream.read_exact(&mut live[range.clone()])?;
                let bytes = live[range].to_vec();
                log.lock().unwrap().push(Entry::Write {
                    drive,
                    offset,
                    bytes,
                });
            }
            2 => return Ok(()),
            3 => log.lock().unwrap().push(Entry::Flush { drive }),
            _ => errno = 22,
        }
        let mut reply = REPLY_MAGIC.to_be_bytes().to_vec();
        reply.extend(errno.to_be_bytes());
        reply.extend(handle);
        reply.extend(answer);
        stream.write_all(&reply)?;
    }
}
