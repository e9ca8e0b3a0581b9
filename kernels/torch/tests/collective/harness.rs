//! Runs the body of a test in several processes at once.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kernels_torch::collective::Comm;
use test_hooks::port::ReservedPort;
use training_ranks::{DIR_VARIABLE, Rendezvous, Timeouts, World};

/// Variable with the name of the test whose body a process runs as one rank.
const TEST: &str = "KERNELS_TEST_RANK_OF";

/// Time after which a rank that has not ended is a failure by itself.
const BOUND: Duration = Duration::from_secs(60);

/// Prefix of lines of rank 0 that are shown even if the test passes.
pub(crate) const MEASURED: &str = "measured: ";

/// Timeouts of the tests: as short as a busy machine allows.
pub(crate) const TIMEOUTS: Timeouts = Timeouts {
    connect: Duration::from_secs(20),
    operation: Duration::from_secs(20),
    silence: Duration::from_secs(2),
    beat: Duration::from_millis(200),
};

/// Meeting point of a test's ranks.
#[derive(Clone, Copy)]
pub(crate) enum Meet {
    Dir,
    Tcp,
}

/// Outcome of a rank.
#[derive(Debug)]
pub(crate) struct RankOutcome {
    pub(crate) success: bool,
    /// Output of the rank on stdout and stderr.
    pub(crate) output: String,
}

/// Whether this process is a rank of `test`, and not the process that starts the ranks.
pub(crate) fn is_rank_of(test: &str) -> bool {
    std::env::var(TEST).is_ok_and(|name| name == test)
}

/// Runs `body` on `ranks` connected ranks; every one must succeed. In a rank this does not return.
pub(crate) fn on_ranks(test: &str, ranks: &[u32], meet: Meet, body: impl FnOnce(Comm)) {
    if is_rank_of(test) {
        body(connect(TIMEOUTS).expect("the ranks connect"));
        std::process::exit(0);
    }
    for &ranks in ranks {
        let ended = run(test, ranks, meet, &[]);
        all_succeed(&ended, |_| true);
        // The line begins with the test's name.
        let lines = ended[0].output.lines();
        for (_, line) in lines.filter_map(|line| line.split_once(MEASURED)) {
            println!("{MEASURED}{line}");
        }
    }
}

/// Asserts that every rank for which `must` is true has succeeded.
pub(crate) fn all_succeed(ended: &[RankOutcome], must: impl Fn(u32) -> bool) {
    let failed = |rank: &usize| must(*rank as u32) && !ended[*rank].success;
    let failed: Vec<usize> = (0..ended.len()).filter(failed).collect();
    let outputs: Vec<String> = failed
        .iter()
        .map(|&rank| format!("rank {rank}:\n{}", ended[rank].output))
        .collect();
    assert!(
        failed.is_empty(),
        "of {} ranks\n{}",
        ended.len(),
        outputs.join("\n")
    );
}

/// Connects like the trainer.
pub(crate) fn connect(timeouts: Timeouts) -> Result<Comm, training_ranks::CollectiveError> {
    let world = World::from_env()?;
    Comm::connect(world, &Rendezvous::from_env(&world)?, timeouts)
}

/// Runs `test` as `ranks` processes, except those in `missing`, and waits for them. Ranks that stopped themselves are killed at the end.
pub(crate) fn run(test: &str, ranks: u32, meet: Meet, missing: &[u32]) -> Vec<RankOutcome> {
    let dir = tempfile::tempdir().unwrap();
    let port = ReservedPort::new();
    let children: Vec<Option<Child>> = (0..ranks)
        .map(|rank| {
            let mut command = rank_command(test, rank, ranks);
            match meet {
                Meet::Dir => command.env(DIR_VARIABLE, dir.path()),
                Meet::Tcp => command
                    .env("MASTER_ADDR", "127.0.0.1")
                    .env("MASTER_PORT", port.number().to_string()),
            };
            (!missing.contains(&rank)).then(|| command.spawn().unwrap())
        })
        .collect();
    wait(children)
}

/// Command that runs this program as one rank of `test`.
pub(crate) fn rank_command(test: &str, rank: u32, ranks: u32) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(TEST, test)
        .env("RANK", rank.to_string())
        .env("LOCAL_RANK", rank.to_string())
        .env("WORLD_SIZE", ranks.to_string())
        .env("LOCAL_WORLD_SIZE", ranks.to_string())
        .env("OMP_NUM_THREADS", "1")
        .env("RUST_BACKTRACE", "0")
        // c10d prints a C++ backtrace for a connection that is lost.
        .env("TORCH_CPP_LOG_LEVEL", "FATAL")
        .env("RAYON_NUM_THREADS", "1")
        // Multicast of NVLink needs privileges that tests do without.
        .env("NCCL_NVLS_ENABLE", "0")
        .env_remove(DIR_VARIABLE)
        .env_remove("MASTER_ADDR")
        .env_remove("MASTER_PORT")
        .env_remove("TORCHELASTIC_USE_AGENT_STORE")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn wait(mut children: Vec<Option<Child>>) -> Vec<RankOutcome> {
    let until = Instant::now() + BOUND;
    let mut left: Vec<usize> = (0..children.len())
        .filter(|&i| children[i].is_some())
        .collect();
    while !left.is_empty() && Instant::now() < until {
        left.retain(|&i| {
            let child = children[i].as_mut().expect("started");
            child.try_wait().unwrap().is_none()
        });
        // The remaining ranks are stopped and will never end by themselves.
        if left
            .iter()
            .all(|&i| is_stopped(children[i].as_ref().expect("started").id()))
        {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let ended = children.iter_mut().map(|child| {
        let Some(child) = child else {
            return RankOutcome {
                success: false,
                output: "not started".to_owned(),
            };
        };
        let _ = child.kill();
        let mut output = String::new();
        let status = child.wait().unwrap();
        child
            .stdout
            .take()
            .unwrap()
            .read_to_string(&mut output)
            .unwrap();
        child
            .stderr
            .take()
            .unwrap()
            .read_to_string(&mut output)
            .unwrap();
        RankOutcome {
            success: status.success(),
            output: format!("{output}\n{status}"),
        }
    });
    ended.collect()
}

fn is_stopped(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        stat.rsplit(") ")
            .next()
            .is_some_and(|rest| rest.starts_with('T'))
    })
}

/// Sends this process the signal called `name`, which ends or stops it.
pub(crate) fn signal_myself(name: &str) -> ! {
    let pid = std::process::id().to_string();
    let kill = Command::new("kill")
        .args([&format!("-{name}"), &pid])
        .status();
    assert!(kill.unwrap().success());
    // A signal stops one thread after the other.
    std::thread::sleep(BOUND);
    panic!("{name} did nothing");
}
