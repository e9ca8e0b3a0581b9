//! Kills one of several ranks, their launcher or their daemon with SIGKILL while a rank waits at a named
//! point of a phase (`test_hooks::kill_point`, test builds only).
//!
//! Errors that these tests find: the others wait for the dead process, or do not report it; one rank's part
//! of a commit or checkpoint is taken for all; work of the first rank alone (the run's record, a name, a
//! line) is incomplete; leftovers make the next start fail. After each kill, all processes must end in time
//! and report which one died, no process or file may be left, and the committed and saved state must be that
//! of a step of a run that was not killed.
//!
//! `OFFLOADD_KILLS=500 cargo test -p trainer-torch --test runs killed_beside` repeats all situations until that
//! many kills were made.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use test_hooks::kill_point::Point;

use crate::harness::{Harness, Run, children, finish, spawn, until};
use crate::killed::{KilledRuns, NewestState};
use crate::random::Random;
use crate::ranks::{END_WAIT, rank_of};

const RANKS: u32 = 2;

/// Steps of a run that is killed several times.
const STEPS_MIN: u64 = 16;

/// Kills of one run before it may finish.
const KILLS_A_RUN: usize = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    /// The rank that waits at the point.
    Itself,
    Other,
    Launcher,
    Daemon,
}

/// Process to kill while a rank waits at a point.
#[derive(Clone, Copy, Debug)]
struct Situation {
    point: Point,
    rank: u32,
    victim: Victim,
}

/// Returns whether a run reaches this point only once, before anything is committed.
fn is_early(point: Point) -> bool {
    matches!(
        point,
        Point::Tokens | Point::Opening | Point::Describing | Point::Filling
    )
}

/// All situations, with those at early points separate.
fn situations() -> (Vec<Situation>, Vec<Situation>) {
    let mut all = Vec::new();
    for point in Point::ALL {
        let ranks = match point {
            // Not reached by runs on one node.
            Point::Prepared | Point::Confirming | Point::CopyingFiles => continue,
            Point::Exporting | Point::NamingExport => continue,
            // Points that only the first rank reaches.
            Point::Tokens
            | Point::Opening
            | Point::Describing
            | Point::Telling
            | Point::NamingCheckpoint
            | Point::CheckpointNamed => 1,
            _ => RANKS,
        };
        for rank in 0..ranks {
            for victim in [
                Victim::Itself,
                Victim::Other,
                Victim::Launcher,
                Victim::Daemon,
            ] {
                // The daemon does not exist yet.
                if (point, victim) != (Point::Tokens, Victim::Daemon) {
                    all.push(Situation {
                        point,
                        rank,
                        victim,
                    });
                }
            }
        }
    }
    all.into_iter()
        .partition(|situation| is_early(situation.point))
}

/// Rendezvous directories of this test.
fn meetings(harness: &Harness) -> Vec<String> {
    let entries =
        std::fs::read_dir(harness.path("tmp")).expect("a directory for what is temporary");
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.collect()
}

/// Processes with `dir` in their environment.
fn processes_of(dir: &Path) -> Vec<Pid> {
    let dir = dir.as_os_str().as_encoded_bytes();
    let entries = std::fs::read_dir("/proc").expect("/proc");
    let pids = entries.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    let of_dir = |pid: &i32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.windows(dir.len()).any(|part| part == dir)
    };
    pids.filter(of_dir).filter_map(Pid::from_raw).collect()
}

/// All processes started with this directory; killed on drop, even after a failed assertion. Otherwise a rank
/// that waits at its point would wait for ever, with its launcher and its daemon.
struct StartedProcesses<'a>(&'a Path);

impl Drop for StartedProcesses<'_> {
    fn drop(&mut self) {
        for pid in processes_of(self.0) {
            // It may have ended in the meantime.
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

impl KilledRuns {
    /// Makes one kill and checks everything afterwards.
    fn beside(&mut self, run: &Run, situation: Situation, seen: &mut NewestState) {
        let Situation {
            point,
            rank,
            victim,
        } = situation;
        let number = match point {
            Point::Filling | Point::Forward | Point::Backward => 3,
            Point::Updated | Point::Writing | Point::Checkpointing => 4,
            Point::Committing | Point::Committed | Point::Telling => 2,
            _ => 1,
        };
        let number = 1 + self.random.below(number);
        let after = format!(
            "{victim:?} while rank {rank} was at {}@{number}, {}",
            point.name(),
            run.dir.display()
        );
        let temporary = self.harness.path("tmp");
        let held = self.harness.path("held");
        let mut command = self.command(run);
        command
            .env("TMPDIR", &temporary)
            .env(
                "OFFLOADD_KILL",
                format!("rank{rank}:{}@{number}", point.name()),
            )
            .env("OFFLOADD_KILL_HOLDS", &held);
        let started = StartedProcesses(&temporary);
        let child = until(spawn(command), &after, || held.exists());
        let launcher = Pid::from_child(&child);
        let dead = match victim {
            Victim::Itself => Some(rank),
            Victim::Other => Some((rank + 1) % RANKS),
            Victim::Launcher | Victim::Daemon => None,
        };
        let pid = match (victim, dead) {
            (_, Some(rank)) => rank_of(&child, rank),
            (Victim::Launcher, _) => launcher,
            _ => {
                let first = rank_of(&child, 0).as_raw_nonzero().get();
                let daemons = children(first as u32);
                assert_eq!(daemons.len(), 1, "{after}: daemons of rank 0");
                daemons[0]
            }
        };
        kill_process(pid, Signal::KILL).expect("the victim exists");
        let since = Instant::now();
        std::fs::remove_file(&held).expect("the file exists until this test removes it");
        let left = |pids: &[Pid]| format!("{after}: {pids:?} ran on");
        loop {
            let pids = processes_of(&temporary);
            // The launcher ends after `finish` has waited for it.
            if pids.is_empty() {
                break;
            }
            if since.elapsed() > END_WAIT {
                drop(started);
                panic!("{}: {:?}", left(&pids), finish(child));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let output = finish(child);
        println!(
            "{after}: {:?}, {} steps",
            since.elapsed(),
            run.steps_written()
        );
        self.expect_words(victim, dead, pid, &output, &after);
        // A killed launcher cannot remove its directory.
        let left = usize::from(victim == Victim::Launcher);
        let meetings = meetings(&self.harness);
        assert_eq!(meetings.len(), left, "{after}: {meetings:?}");
        self.check_resumable(run, seen, &after);
        self.look_at_checkpoint(run, seen, &after);
    }

    fn expect_words(
        &self,
        victim: Victim,
        dead: Option<u32>,
        pid: Pid,
        output: &Output,
        after: &str,
    ) {
        let err = String::from_utf8_lossy(&output.stderr);
        print!("{err}");
        match (victim, dead) {
            (Victim::Launcher, _) => assert_eq!(output.status.signal(), Some(9), "{after}: {err}"),
            (_, Some(rank)) => {
                let pid = pid.as_raw_nonzero();
                let says = format!(
                    "trainer: rank {rank} (process {pid}) was killed by signal 9 (SIGKILL)"
                );
                assert!(err.contains(&says), "{after}: {err}");
                assert_eq!(output.status.code(), Some(128 + 9), "{after}: {err}");
                // A rank that has just started may end without a message.
                let other = format!("trainer: rank {}: ", (rank + 1) % RANKS);
                let name = format!("rank {rank}");
                for says in err.lines().filter_map(|line| line.strip_prefix(&other)) {
                    assert!(says.contains(&name), "{after}: {err}");
                }
            }
            _ => {
                let says = ["private offloadd: ", "offloadd.sock"];
                let named = says.iter().any(|says| err.contains(says));
                assert!(named, "{after}: what happened to the daemon? {err}");
                assert_eq!(output.status.code(), Some(1), "{after}: {err}");
            }
        }
    }

    /// Runs one `early` situation, then `later` ones as long as the run has steps, then lets it finish.
    fn of_ranks(&mut self, number: u64, early: Situation, later: &[Situation]) -> u64 {
        let run = self.run(number);
        let mut seen = NewestState::default();
        self.beside(&run, early, &mut seen);
        for situation in later {
            let run = match situation.point {
                Point::Draining | Point::Closing => self.stopped(self.run(number)),
                _ => self.run(number),
            };
            self.beside(&run, *situation, &mut seen);
        }
        self.end(&run, &mut seen);
        assert_eq!(processes_of(&self.harness.path("tmp")), []);
        1 + later.len() as u64
    }
}

#[test]
fn ranks_killed_beside_each_other_end_together_and_resume_bit_for_bit() {
    let seed = Random::seed("situations and numbers of times that a point is passed before");
    let killed = |steps_count| {
        // Half of all starts of this test have ranks that divide each sequence.
        let divided = format!("train.sequence_parallel={}", 1 + seed % 2);
        let killed = KilledRuns::new(RANKS, steps_count, 1, &[&divided], &[], seed);
        std::fs::create_dir(killed.harness.path("tmp")).expect("a directory");
        killed
    };
    let Ok(wanted) = std::env::var("OFFLOADD_KILLS") else {
        let mut killed = killed(STEPS_MIN);
        let situation = |point, rank, victim| Situation {
            point,
            rank,
            victim,
        };
        let later = [
            situation(Point::Committing, 1, Victim::Other),
            situation(Point::Checkpointing, 1, Victim::Launcher),
            situation(Point::Committed, 0, Victim::Daemon),
        ];
        killed.of_ranks(0, situation(Point::Filling, 1, Victim::Itself), &later);
        return;
    };
    let wanted: u64 = wanted.parse().expect("a number of kills");
    let mut killed = killed(STEPS_MIN * KILLS_A_RUN as u64);
    let (early, later) = situations();
    let (mut kills, mut runs) = (0, 0);
    let mut waiting: [Vec<Situation>; 2] = Default::default();
    while kills < wanted {
        for (waiting, all) in waiting.iter_mut().zip([&early, &later]) {
            while waiting.len() < KILLS_A_RUN {
                waiting.extend(all);
            }
        }
        let [early, later] = &mut waiting;
        let mut draw = |from: &mut Vec<Situation>| {
            let index = killed.random.below(from.len() as u64) as usize;
            from.swap_remove(index)
        };
        let first = draw(early);
        let rest: Vec<_> = (1..KILLS_A_RUN).map(|_| draw(later)).collect();
        kills += killed.of_ranks(runs, first, &rest);
        runs += 1;
    }
    println!("{kills} kills in {runs} runs of {RANKS} ranks");
}
