//! Offloading changes no bit: the place of parameters and optimizer state, and the time of updates, do not
//! affect results.
//!
//! Errors that these tests find: a tile is used before its update, updated twice, or updated with another
//! step's gradients or rate; resident and staged tiles are rounded differently; the split master loses a bit
//! on a drive; the gradient of a tied head or of a later micro-batch is lost between two units. Each run is
//! compared with one in host memory: losses, gradient norms, and fingerprints of all weights and optimizer
//! state. Staging is smaller than the tiles, so that what is written is read again.

use crate::daemon::Daemon;
use crate::harness::{Harness, Run};

const NVME: [&str; 2] = [
    "zero_optimization.offload_param.device=nvme",
    "zero_optimization.offload_optimizer.device=nvme",
];
const CPU: [&str; 2] = [
    "zero_optimization.offload_param.device=cpu",
    "zero_optimization.offload_optimizer.device=cpu",
];

struct Ways {
    harness: Harness,
    daemon: Daemon,
    /// Settings common to all runs.
    sets: &'static [&'static str],
    losses: Vec<u64>,
    norms: Vec<u64>,
    fingerprint: String,
}

impl Ways {
    /// Makes a run in host memory, and a store for the others.
    fn new(sets: &'static [&'static str]) -> Self {
        let harness = Harness::new();
        let daemon = Daemon::start(&harness);
        let plain = harness.run("none", sets);
        plain.train();
        let (losses, norms, fingerprint) = (
            plain.bits("loss"),
            plain.bits("grad_norm"),
            plain.fingerprint(),
        );
        assert_eq!(losses.len(), 6);
        Self {
            harness,
            daemon,
            sets,
            losses,
            norms,
            fingerprint,
        }
    }

    fn same(&self, name: &str, sets: &[&str]) -> Run {
        let run = self.harness.run(name, self.sets).with(sets);
        run.train();
        assert_eq!(run.bits("loss"), self.losses, "losses of {name}");
        assert_eq!(run.bits("grad_norm"), self.norms, "norms of {name}");
        assert_eq!(
            run.fingerprint(),
            self.fingerprint,
            "weights and state of {name}"
        );
        run
    }

    /// Like [`Ways::same`]; the tiles that `sets` put on nvme must use the store. Returns the bytes read from
    /// the device.
    fn same_on_store(&self, name: &str, sets: &[&str]) -> u64 {
        let socket = self.daemon.socket();
        let sets: Vec<&str> = sets
            .iter()
            .copied()
            .chain(socket.iter().map(String::as_str))
            .collect();
        let metrics = self.same(name, &sets).metrics();
        let sum =
            |key: &str| -> u64 { metrics.iter().map(|line| line[key].as_u64().unwrap()).sum() };
        assert!(
            sum("device_written_bytes") > 0,
            "{name} wrote nothing to its device"
        );
        sum("device_read_bytes")
    }

    /// Runs with everything on nvme except a resident fraction.
    fn same_at(&self, schedule: &str, share: &str) {
        let name = format!("{schedule}-{share}");
        let (schedule, resident) = (
            format!("offload.optimizer_step={schedule}"),
            format!("offload.resident_fraction={share}"),
        );
        // With so many resident tiles, the plan would choose a commit interval longer than the run.
        let every = "offload.commit_every=1";
        let read_bytes =
            self.same_on_store(&name, &[NVME[0], NVME[1], &schedule, &resident, every]);
        assert_eq!(
            read_bytes > 0,
            share != "1",
            "{name} read {read_bytes} bytes from its device"
        );
    }

    /// Runs in host memory and on a store, with either schedule, and with nothing, half or everything
    /// resident.
    fn same_everywhere(&self) {
        self.same("none-immediate", &["offload.optimizer_step=immediate"]);
        with_both(|schedule| {
            let set = format!("offload.optimizer_step={schedule}");
            self.same(&format!("cpu-{schedule}"), &[CPU[0], CPU[1], &set]);
            for share in ["0", "0.5", "1"] {
                self.same_at(schedule, share);
            }
        });
    }
}

#[test]
fn offload_changes_no_bit_in_bf16() {
    Ways::new(&["bf16.enabled=true"]).same_everywhere();
}

#[test]
fn offload_changes_no_bit_in_fp32() {
    Ways::new(&["bf16.enabled=false"]).same_everywhere();
}

#[test]
fn parameters_in_host_memory_and_rare_commits_change_no_bit() {
    let ways = Ways::new(&["bf16.enabled=true"]);
    ways.same_on_store("params-at-home", &[CPU[0], NVME[1]]);
    let rarely = ["offload.commit_every=4", "offload.resident_fraction=0.5"];
    ways.same_on_store("rarely", &[NVME[0], NVME[1], rarely[0], rarely[1]]);
}

/// Bytes of gradients written to devices and read from them over all steps.
fn spilled(run: &Run) -> [u64; 2] {
    ["device_grad_read_bytes", "device_grad_written_bytes"].map(|key| {
        let metrics = run.metrics();
        metrics.iter().map(|line| line[key].as_u64().unwrap()).sum()
    })
}

#[test]
fn gradients_on_devices_change_no_bit_and_move_the_planned_bytes() {
    let ways = Ways::new(&["bf16.enabled=true", "gradient_accumulation_steps=2"]);
    with_both(|schedule| {
        let trained = |gradients: &str| {
            let sets = [
                NVME[0],
                NVME[1],
                &format!("offload.optimizer_step={schedule}"),
                &format!("offload.gradients={gradients}"),
                // Two more slots of each kind, and little else.
                "offload.staging_bytes=130000",
                &ways.daemon.socket()[0],
            ];
            ways.same(&format!("{gradients}-{schedule}"), &sets)
        };
        let run = trained("nvme");
        let (report, _) = crate::plan::plan(&run, &[]);
        let planned = report["step"]["grad_written_bytes"].as_u64().unwrap();
        assert!(planned > 0);
        // Six steps. The last gradients of a step may stay in their slots until their update.
        for moved in spilled(&run) {
            assert!(
                (3 * planned..=6 * planned).contains(&moved),
                "{schedule}: {moved} bytes in 6 steps of {planned}"
            );
        }
        assert_eq!(spilled(&trained("cpu")), [0, 0]);
    });
}

#[test]
fn a_tied_head_and_several_micro_batches_change_no_bit_in_bf16() {
    tied_and_accumulated(&[
        "bf16.enabled=true",
        "model.tie_word_embeddings=true",
        "gradient_accumulation_steps=3",
    ]);
}

#[test]
fn a_tied_head_and_several_micro_batches_change_no_bit_in_fp32() {
    tied_and_accumulated(&[
        "bf16.enabled=false",
        "model.tie_word_embeddings=true",
        "gradient_accumulation_steps=3",
    ]);
}

fn tied_and_accumulated(sets: &'static [&'static str]) {
    let ways = Ways::new(sets);
    with_both(|schedule| ways.same_at(schedule, "0.5"));
}

/// Runs `check` for both schedules at the same time, because a short run is mostly the start of programs.
fn with_both(check: impl Fn(&str) + Sync) {
    std::thread::scope(|scope| {
        scope.spawn(|| check("deferred"));
        check("immediate");
    });
}
