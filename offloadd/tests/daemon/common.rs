//! For tests of whole daemons: a store in a temporary folder, the program on it, and a process's side by hand (the client
//! crate has its own tests; here every byte can be wrong on purpose).

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use offload_api::checksum::checksum;
use offload_api::fault::Fault;
use offload_api::handoff::{self, HandoffError, Received};
use offload_api::ids::{Epoch, Generation, SessionToken, SlotIndex, TicketId, TileIndex};
use offload_api::proto::offload_client::OffloadClient;
use offload_api::proto::{self, OpenSessionRequest};
use offload_api::ring::entry::{Cqe, Request, Urgency, Verb};
use offload_api::ring::{ProcessRings, RingMap};
use offload_api::{PROTOCOL_VERSION, geometry};
use offloadd::blocks::Blocks;
use offloadd::device::{Device, DeviceBlocks};
use offloadd::engine::{Engine, EngineChoice};
use offloadd::store::{SUPERBLOCK_OFFSETS, recover};
use tonic::transport::{Channel, Endpoint};

pub(crate) fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_offloadd"))
}

/// The program under another name. Never a copy written here: a process that another test starts meanwhile would hold it open
/// for writing, and it could not be started ("text file busy").
pub(crate) fn link_program(name: &Path) {
    let program = env!("CARGO_BIN_EXE_offloadd");
    if std::fs::hard_link(program, name).is_err() {
        let copied = Command::new("cp").arg(program).arg(name).status().unwrap();
        assert!(copied.success());
    }
}

/// A formatted store of `devices` files, and its settings.
pub(crate) struct Store {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) devices: Vec<PathBuf>,
    pub(crate) config: PathBuf,
}

impl Store {
    pub(crate) fn new(devices: usize, engine: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let devices: Vec<_> = (0..devices)
            .map(|i| folder.path().join(format!("device{i}")))
            .collect();
        let output = program()
            .arg("format")
            .args(&devices)
            .args(["--size", "8MiB"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", words(&output));
        let config = folder.path().join("offloadd.toml");
        let store = Self {
            config,
            devices,
            folder,
        };
        store.write_config(&store.socket(), engine);
        store
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("run/offloadd.sock")
    }

    pub(crate) fn write_config(&self, socket: &Path, engine: &str) {
        let text = format!(
            "socket = {socket:?}\ndevices = {:?}\narena_bytes_max = \"64MiB\"\nengine = \"{engine}\"\n",
            self.devices
        );
        std::fs::write(&self.config, text).unwrap();
    }

    /// Before the first table of the file.
    pub(crate) fn add_setting(&self, line: &str) {
        let text = std::fs::read_to_string(&self.config).unwrap();
        std::fs::write(&self.config, format!("{line}\n{text}")).unwrap();
    }

    /// Makes each device's rates, both ways, what they never were. While nobody serves it.
    pub(crate) fn set_rates(&self, bytes_per_s: &[u64]) {
        let opened = self.devices.iter().map(|path| Device::open(path).unwrap());
        let opened: Vec<Device> = opened.collect();
        let mut blocks = DeviceBlocks(&opened);
        for device in recover::read(&mut blocks).unwrap().devices {
            let mut superblock = device.superblock;
            superblock.read_bytes_per_s = bytes_per_s[device.position];
            superblock.write_bytes_per_s = bytes_per_s[device.position];
            for offset in SUPERBLOCK_OFFSETS {
                let block = superblock.encode();
                blocks.write(device.position, offset, &block).unwrap();
            }
        }
    }

    pub(crate) fn serve_command(&self) -> Command {
        let mut command = program();
        command.args(["serve", "--config"]).arg(&self.config);
        command
    }

    pub(crate) fn serve(&self) -> Daemon {
        Daemon::start(self.serve_command(), self.socket())
    }

    /// What a daemon says that must refuse to start.
    pub(crate) fn refusal(&self) -> String {
        let output = self.serve_command().output().unwrap();
        assert!(!output.status.success(), "{}", words(&output));
        words(&output)
    }
}

pub(crate) fn words(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

/// A running daemon, killed when dropped.
pub(crate) struct Daemon {
    pub(crate) child: Child,
    pub(crate) ready: String,
    pub(crate) socket: PathBuf,
}

impl Daemon {
    pub(crate) fn start(mut command: Command, socket: PathBuf) -> Self {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = String::new();
        BufReader::new(child.stdout.as_mut().unwrap())
            .read_line(&mut ready)
            .unwrap();
        if !ready.starts_with("READY ") {
            let mut error = String::new();
            child
                .stderr
                .take()
                .unwrap()
                .read_to_string(&mut error)
                .unwrap();
            let _ = child.wait();
            panic!("the daemon did not start: {error}");
        }
        Self {
            child,
            ready,
            socket,
        }
    }

    pub(crate) fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.child)
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(self.pid(), signal).unwrap();
    }

    /// Its exit code, `None` when a signal ended it.
    pub(crate) fn wait(&mut self, limit: Duration) -> Option<i32> {
        let end = Instant::now() + limit;
        while Instant::now() < end {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("the daemon has not ended after {limit:?}");
    }

    pub(crate) fn control(&self) -> Control {
        Control::connect(&self.socket)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Calls, one at a time.
pub(crate) struct Control {
    runtime: tokio::runtime::Runtime,
    client: OffloadClient<Channel>,
}

/// One blocking call.
macro_rules! call {
    ($name:ident, $request:ty, $reply:ty) => {
        pub(crate) fn $name(&mut self, request: $request) -> Result<$reply, Fault> {
            let answer = self.runtime.block_on(async {
                tokio::time::timeout(Duration::from_secs(60), self.client.$name(request))
                    .await
                    .expect("an answer within 15 s")
            });
            answer
                .map(tonic::Response::into_inner)
                .map_err(|status| Fault::from(&status))
        }
    };
}

impl Control {
    pub(crate) fn connect(socket: &Path) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let endpoint = Endpoint::from_shared(format!("unix:{}", socket.display())).unwrap();
        let channel = runtime.block_on(endpoint.connect()).unwrap();
        Self {
            runtime,
            client: OffloadClient::new(channel),
        }
    }

    call!(describe, proto::DescribeRequest, proto::DescribeReply);
    call!(
        open_session,
        proto::OpenSessionRequest,
        proto::OpenSessionReply
    );
    call!(
        define_tiles,
        proto::DefineTilesRequest,
        proto::DefineTilesReply
    );
    call!(
        reserve_scratch,
        proto::ReserveScratchRequest,
        proto::ReserveScratchReply
    );
    call!(reattach, proto::ReattachRequest, proto::ReattachReply);
    call!(resume, proto::ResumeRequest, proto::ResumeReply);
    call!(commit, proto::CommitRequest, proto::CommitReply);
    call!(
        report_damage,
        proto::ReportDamageRequest,
        proto::ReportDamageReply
    );
    call!(metrics, proto::MetricsRequest, proto::MetricsReply);
    call!(
        close_session,
        proto::CloseSessionRequest,
        proto::CloseSessionReply
    );

    call!(drop_job, proto::DropJobRequest, proto::DropJobReply);
    call!(
        drain_device,
        proto::DrainDeviceRequest,
        proto::DrainDeviceReply
    );

    pub(crate) fn arena_free_bytes(&mut self) -> u64 {
        self.describe(proto::DescribeRequest {})
            .unwrap()
            .arena_free_bytes
    }

    /// Opens a session of `job` with four slots of 4 KiB, and takes its descriptors.
    pub(crate) fn session(&mut self, job: &str) -> Session {
        let reply = self.open_session(open(job)).unwrap();
        Session::attach(&reply).unwrap()
    }
}

pub(crate) fn open(job: &str) -> OpenSessionRequest {
    open_sized(job, 4096)
}

pub(crate) fn open_sized(job: &str, slot_bytes: u64) -> OpenSessionRequest {
    OpenSessionRequest {
        protocol_version: PROTOCOL_VERSION,
        job: job.into(),
        rank: 0,
        local_ranks: 1,
        classes: vec![proto::SlotClass {
            slot_bytes,
            slot_count: 4,
        }],
        iodepth: 4,
    }
}

/// A process's side of one session.
pub(crate) struct Session {
    pub(crate) token: Vec<u8>,
    pub(crate) epoch: Epoch,
    pub(crate) geometry: geometry::Geometry,
    pub(crate) rings: ProcessRings,
    pub(crate) received: Received,
}

impl Session {
    pub(crate) fn attach(reply: &proto::OpenSessionReply) -> Result<Self, HandoffError> {
        Self::attach_sized(reply, 4096)
    }

    /// Of a session whose four slots have this size.
    pub(crate) fn attach_sized(
        reply: &proto::OpenSessionReply,
        slot_bytes: u64,
    ) -> Result<Self, HandoffError> {
        let class = geometry::SlotClass {
            slot_bytes,
            slot_count: 4,
        };
        Self::attach_of(reply, class)
    }

    /// Of a session whose slots are all of `class`.
    pub(crate) fn attach_of(
        reply: &proto::OpenSessionReply,
        class: geometry::SlotClass,
    ) -> Result<Self, HandoffError> {
        let token = SessionToken::from_bytes(&reply.token).unwrap();
        let socket = Path::new(&reply.descriptor_socket);
        let received = handoff::receive(socket, token, Duration::from_secs(60))?;
        Ok(Self {
            token: reply.token.clone(),
            epoch: Epoch(reply.epoch),
            geometry: geometry::Geometry::new(&[class]).unwrap(),
            rings: ProcessRings::new(RingMap::open(&received.ring).unwrap()),
            received,
        })
    }

    /// Defines `count` tiles of 4 KiB and resumes from nothing.
    pub(crate) fn begin(&self, control: &mut Control, count: u32) -> u64 {
        self.begin_sized(control, count, 4096)
    }

    /// The same with tiles of another size.
    pub(crate) fn begin_sized(&self, control: &mut Control, count: u32, tile_bytes: u32) -> u64 {
        let tiles = (0..count).map(|unit| proto::Tile {
            unit,
            kind: 1,
            elem_offset: 0,
            tile_bytes,
        });
        control
            .define_tiles(proto::DefineTilesRequest {
                token: self.token.clone(),
                layout: b"layout".to_vec(),
                tiles: tiles.collect(),
                durability: 1,
                nodes: 1,
            })
            .unwrap();
        self.resume(control, 0)
    }

    pub(crate) fn resume(&self, control: &mut Control, generation: u64) -> u64 {
        let token = self.token.clone();
        let reply = control.resume(proto::ResumeRequest { token, generation });
        reply.unwrap().working_generation
    }

    pub(crate) fn commit(&self, control: &mut Control, generation: u64, blob: &[u8]) -> u64 {
        let request = proto::CommitRequest {
            token: self.token.clone(),
            generation,
            blob: blob.to_vec(),
        };
        control.commit(request).unwrap().working_generation
    }

    pub(crate) fn submit(&mut self, request: Request) {
        assert!(self.rings.put(&request.to_sqe(self.epoch)).unwrap());
        self.ring();
    }

    pub(crate) fn ring(&self) {
        rustix::io::write(&self.received.submission_doorbell, &1u64.to_ne_bytes()).unwrap();
    }

    /// The next completion, found by sleeping on the doorbell as a process does.
    pub(crate) fn complete(&mut self) -> Cqe {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(cqe) = self.rings.take().unwrap() {
                if cqe.is_part() {
                    continue;
                }
                return cqe;
            }
            assert!(Instant::now() < end, "no completion in 10 s");
            if readable(&self.received.completion_doorbell, Duration::from_secs(1)) {
                rustix::io::read(&self.received.completion_doorbell, &mut [0u8; 8]).unwrap();
            }
        }
    }

    pub(crate) fn write_slot(&self, offset: u64, bytes: &[u8]) {
        rustix::io::pwrite(&self.received.arena, bytes, offset).unwrap();
    }

    pub(crate) fn read_slot(&self, offset: u64) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        rustix::io::pread(&self.received.arena, &mut bytes[..], offset).unwrap();
        bytes
    }

    /// Whether the daemon closed its end within `limit`.
    pub(crate) fn hung_up(&self, limit: Duration) -> bool {
        readable(&self.received.life_line, limit)
    }
}

pub(crate) fn readable(fd: impl std::os::fd::AsFd, limit: Duration) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let limit = Timespec::try_from(limit).unwrap();
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)).unwrap() == 1
}

/// Waits until `question` is answered with yes.
pub(crate) fn eventually(what: &str, limit: Duration, mut question: impl FnMut() -> bool) {
    let end = Instant::now() + limit;
    while !question() {
        assert!(Instant::now() < end, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn swap_out(tile: u32, slot: u32, generation: u64, bytes: &[u8]) -> Request {
    Request {
        ticket: TicketId(u64::from(tile) + 100),
        verb: Verb::SwapOut,
        urgency: Urgency::Ahead,
        tile: TileIndex(tile),
        slot: SlotIndex(slot),
        generation: Generation(generation),
        checksum: checksum(bytes),
    }
}

pub(crate) fn swap_in(tile: u32, slot: u32) -> Request {
    Request {
        ticket: TicketId(u64::from(tile) + 200),
        verb: Verb::SwapIn,
        urgency: Urgency::Ahead,
        generation: Generation(0),
        checksum: 0,
        tile: TileIndex(tile),
        slot: SlotIndex(slot),
    }
}

/// Writes `fill` to every tile through slot 1 and waits for each.
pub(crate) fn fill_tiles(session: &mut Session, count: u32, generation: u64, fill: u8) {
    let place = session.geometry.place(SlotIndex(1)).unwrap();
    for tile in 0..count {
        let bytes = [fill.wrapping_add(tile as u8); 4096];
        session.write_slot(place.offset, &bytes);
        session.submit(swap_out(tile, 1, generation, &bytes));
        let cqe = session.complete();
        assert_eq!(
            (cqe.ticket, cqe.fault),
            (u64::from(tile) + 100, 0),
            "{cqe:?}"
        );
    }
}

pub(crate) fn expect_tiles(session: &mut Session, count: u32, fill: u8) {
    let place = session.geometry.place(SlotIndex(3)).unwrap();
    for tile in 0..count {
        session.write_slot(place.offset, &[0; 4096]);
        session.submit(swap_in(tile, 3));
        let cqe = session.complete();
        assert_eq!((cqe.fault, cqe.moved_bytes), (0, 4096), "{cqe:?}");
        let bytes = session.read_slot(place.offset);
        assert_eq!(bytes, vec![fill.wrapping_add(tile as u8); 4096]);
        assert_eq!(cqe.checksum, checksum(&bytes));
    }
}

/// The engines this machine has; says which it has not.
pub(crate) fn engines() -> Vec<&'static str> {
    let any = std::sync::Arc::new(tempfile::tempfile().unwrap());
    any.set_len(4096).unwrap();
    let mut found = Vec::new();
    for name in ["uring", "aio", "psync"] {
        let choice = EngineChoice::from_name(name).unwrap();
        match Engine::open(choice, std::slice::from_ref(&any), 16) {
            Ok(_) => found.push(name),
            Err(error) => println!(
                "skipped: {}: {error}",
                std::thread::current().name().unwrap_or("a test")
            ),
        }
    }
    found
}
