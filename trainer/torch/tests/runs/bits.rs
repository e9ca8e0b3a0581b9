//! Offloading changes no bit: the place of parameters and optimizer state, and the time of updates, do not
//! affect results.
//!
//! Errors that these tests find: a tile is used before its update, updated twice, or updated with another
//! step's gradients or rate; resident and staged tiles are rounded differently; the split master loses a bit
//! on a drive; the gradient of a tied head or of a later micro-batch is lost between two units. Each run is
//! compared with one in host memory: losses, gradient norms, and fingerprints of all weights and optimizer
//! state. Staging is smaller than the tiles, so that what is written is read again.
//!
//! A push tries bf16 with one micro-batch, and fp32 with a tied head and three, at fewer places;
//! `OFFLOADD_ALL_CASES=1 cargo test -p trainer-torch --test runs bits` tries every place with each.

use crate::daemon::Daemon;
use crate::harness::{Harness, Run, all_cases};

/// Where a run has its tiles, and when it updates them.
struct Way {
    schedule: &'static str,
    params: &'static str,
    optimizer: &'static str,
    sets: &'static [&'static str],
}

const fn way(
    schedule: &'static str,
    places: [&'static str; 2],
    sets: &'static [&'static str],
) -> Way {
    Way {
        schedule,
        params: places[0],
        optimizer: places[1],
        sets,
    }
}

const NONE: [&str; 2] = ["none", "none"];
const CPU: [&str; 2] = ["cpu", "cpu"];
const NVME: [&str; 2] = ["nvme", "nvme"];

// With many resident tiles, the plan would choose a commit interval longer than the run.
const STREAMED: &[&str] = &["offload.resident_fraction=0", "offload.commit_every=1"];
const HALF: &[&str] = &["offload.resident_fraction=0.5", "offload.commit_every=1"];
const RESIDENT: &[&str] = &["offload.resident_fraction=1", "offload.commit_every=1"];
const RARELY: &[&str] = &["offload.resident_fraction=0.5", "offload.commit_every=4"];

/// Every place, the most different ones first.
const PLACES: &[Way] = &[
    way("deferred", NVME, HALF),
    way("immediate", NVME, STREAMED),
    way("immediate", CPU, &[]),
    way("deferred", ["cpu", "nvme"], &[]),
    way("deferred", NVME, RESIDENT),
    way("immediate", NVME, RARELY),
    way("deferred", CPU, &[]),
    way("immediate", NONE, &[]),
    way("deferred", NVME, STREAMED),
    way("deferred", NVME, RARELY),
    way("immediate", NVME, HALF),
    way("immediate", NVME, RESIDENT),
];

/// How many of [`PLACES`] a push tries: those after them differ from one of them in one setting.
const PLACES_OF_A_PUSH: usize = 8;

/// Two more slots of each kind, and little else.
const TIGHT: &str = "offload.staging_bytes=130000";

/// Places of gradients.
const GRADIENTS: &[Way] = &[
    way("deferred", NVME, &["offload.gradients=nvme", TIGHT]),
    way("immediate", NVME, &["offload.gradients=nvme", TIGHT]),
    way("deferred", NVME, &["offload.gradients=cpu", TIGHT]),
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

    /// Trains at each place of `table` and compares. Both schedules run at the same time, because a short run is mostly the start
    /// of programs.
    fn same_at(&self, table: &[Way]) {
        let of = |schedule: &str| {
            let ways = table.iter().enumerate();
            for (number, way) in ways.filter(|(_, way)| way.schedule == schedule) {
                self.same(&format!("{schedule}-{number}"), way);
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| of("deferred"));
            of("immediate");
        });
    }

    fn same(&self, name: &str, way: &Way) {
        let on_store = way.optimizer == "nvme";
        let mut sets = vec![
            format!("offload.optimizer_step={}", way.schedule),
            format!("zero_optimization.offload_param.device={}", way.params),
            format!(
                "zero_optimization.offload_optimizer.device={}",
                way.optimizer
            ),
        ];
        if on_store {
            sets.extend(self.daemon.socket());
        }
        let run = self.harness.run(name, self.sets).with(way.sets).with(&sets);
        run.train();
        let name = format!("{name}: {sets:?} {:?}", way.sets);
        assert_eq!(run.bits("loss"), self.losses, "losses of {name}");
        assert_eq!(run.bits("grad_norm"), self.norms, "norms of {name}");
        assert_eq!(
            run.fingerprint(),
            self.fingerprint,
            "weights and state of {name}"
        );
        let written = moved(&run, "device_written_bytes");
        assert_eq!(written > 0, on_store, "{name} wrote {written} bytes");
        let read = moved(&run, "device_read_bytes");
        let reads = on_store && way.sets != RESIDENT;
        assert_eq!(read > 0, reads, "{name} read {read} bytes from its device");
        let gradients = ["device_grad_read_bytes", "device_grad_written_bytes"];
        let gradients = gradients.map(|key| moved(&run, key));
        if !way.sets.contains(&"offload.gradients=nvme") {
            return assert_eq!(gradients, [0, 0], "{name}");
        }
        let (report, _) = crate::plan::plan(&run, &[]);
        let planned = report["step"]["grad_written_bytes"].as_u64().unwrap();
        assert!(planned > 0);
        // Six steps. The last gradients of a step may stay in their slots until their update.
        for bytes in gradients {
            assert!(
                (3 * planned..=6 * planned).contains(&bytes),
                "{name}: {bytes} bytes in 6 steps of {planned}"
            );
        }
    }
}

/// Bytes moved over all steps, by their key in the metrics.
pub(crate) fn moved(run: &Run, key: &str) -> u64 {
    let metrics = run.metrics();
    metrics.iter().map(|line| line[key].as_u64().unwrap()).sum()
}

/// Compares the first `count` ways of `table` for the first of `models`; with all cases, every way for every model.
fn compare(models: &[&'static [&'static str]], table: &[Way], count: usize) {
    let (models, table) = if all_cases() {
        (models, table)
    } else {
        (&models[..1], &table[..count])
    };
    for &sets in models {
        Ways::new(sets).same_at(table);
    }
}

const BF16: &[&str] = &["bf16.enabled=true"];
const FP32: &[&str] = &["bf16.enabled=false"];
const BF16_TIED: &[&str] = &[
    "bf16.enabled=true",
    "model.tie_word_embeddings=true",
    "gradient_accumulation_steps=3",
];
const FP32_TIED: &[&str] = &[
    "bf16.enabled=false",
    "model.tie_word_embeddings=true",
    "gradient_accumulation_steps=3",
];

#[test]
fn offload_changes_no_bit_in_bf16() {
    compare(&[BF16, BF16_TIED], PLACES, PLACES_OF_A_PUSH);
}

#[test]
fn offload_changes_no_bit_in_fp32_with_a_tied_head_and_several_micro_batches() {
    compare(&[FP32_TIED, FP32], PLACES, 3);
}

#[test]
fn gradients_on_devices_change_no_bit_and_move_the_planned_bytes() {
    const MODEL: &[&str] = &["bf16.enabled=true", "gradient_accumulation_steps=2"];
    compare(&[MODEL], GRADIENTS, GRADIENTS.len());
}
