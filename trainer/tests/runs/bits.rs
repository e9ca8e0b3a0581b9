//! Offload changes nothing: wherever parameters and optimizer live, and whenever updates run, the bits are the same.
//!
//! What could go wrong: a tile is used before its update, or updated twice, or with another step's gradients or rate; a
//! resident tile and a staged one round differently; the split master loses a bit on its way through a drive. Each run is
//! compared with one that never leaves host memory: every loss and gradient norm, and for one run of each kind the
//! fingerprints of all weights and optimizer state too (each fingerprint is one more start of libtorch, half a second).

use crate::daemon::Daemon;
use crate::lab::{Lab, Run};

const NVME: [&str; 2] = [
    "zero_optimization.offload_param.device=nvme",
    "zero_optimization.offload_optimizer.device=nvme",
];

struct Ways {
    lab: Lab,
    daemon: Daemon,
    dtype: &'static str,
    losses: Vec<u64>,
    norms: Vec<u64>,
    digest: String,
}

impl Ways {
    /// A run that never leaves host memory, and a store for the others.
    fn new(dtype: &'static str) -> Self {
        let lab = Lab::new();
        let daemon = Daemon::start(&lab);
        let plain = lab.run("none", &[dtype]);
        plain.train();
        let (losses, norms, digest) = (plain.bits("loss"), plain.bits("grad_norm"), plain.digest());
        assert_eq!(losses.len(), 6);
        Self {
            lab,
            daemon,
            dtype,
            losses,
            norms,
            digest,
        }
    }

    fn same(&self, name: &str, sets: &[&str]) -> Run {
        let run = self.lab.run(name, sets).with(&[self.dtype]);
        run.train();
        assert_eq!(run.bits("loss"), self.losses, "losses of {name}");
        assert_eq!(run.bits("grad_norm"), self.norms, "norms of {name}");
        run
    }

    fn same_to_the_end(&self, run: &Run) {
        assert_eq!(
            run.digest(),
            self.digest,
            "weights and state in {}",
            run.folder.display()
        );
    }

    /// As [`Ways::same`], with all that `sets` put on nvme in the store.
    fn same_on_store(&self, name: &str, sets: &[&str]) -> Run {
        let socket = self.daemon.socket();
        let sets: Vec<&str> = sets
            .iter()
            .copied()
            .chain(socket.iter().map(String::as_str))
            .collect();
        let run = self.same(name, &sets);
        let written = run
            .metrics()
            .iter()
            .map(|line| line["device_written_bytes"].as_u64().unwrap())
            .sum::<u64>();
        assert!(written > 0, "{name} wrote nothing to its device");
        run
    }

    fn same_at(&self, schedule: &str, share: &str) -> Run {
        let name = format!("{schedule}-{share}");
        let (schedule, share) = (
            format!("offload.schedule={schedule}"),
            format!("offload.resident_share={share}"),
        );
        self.same_on_store(&name, &[NVME[0], NVME[1], &schedule, &share])
    }
}

#[test]
fn offload_changes_no_bit_in_bf16() {
    let ways = Ways::new("bf16.enabled=true");
    let cpu = [
        "zero_optimization.offload_param.device=cpu",
        "zero_optimization.offload_optimizer.device=cpu",
    ];
    ways.same("cpu", &cpu);
    ways.same("cpu-at-once", &[cpu[0], cpu[1], "offload.schedule=at_once"]);
    for (schedule, share_to_the_end) in [("deferred", "0.5"), ("at_once", "0")] {
        for share in ["0", "0.5", "1"] {
            let run = ways.same_at(schedule, share);
            if share == share_to_the_end {
                ways.same_to_the_end(&run);
            }
        }
    }
    ways.same_to_the_end(&ways.same_on_store("params-at-home", &[cpu[0], NVME[1]]));
    let rarely = ["offload.commit_every=4", "offload.resident_share=0.5"];
    let rarely = ways.same_on_store("rarely", &[NVME[0], NVME[1], rarely[0], rarely[1]]);
    ways.same_to_the_end(&rarely);
}

#[test]
fn offload_changes_no_bit_in_fp32() {
    let ways = Ways::new("bf16.enabled=false");
    ways.same_to_the_end(&ways.same_at("deferred", "0"));
    ways.same_at("at_once", "0.5");
}
