//! Offload changes nothing: wherever parameters and optimizer live, and whenever updates run, the bits are the same.
//!
//! What could go wrong: a tile is used before its update, or updated twice, or with another step's gradients or rate; a
//! resident tile and a staged one round differently; the split master loses a bit on its way through a drive. Each run is
//! compared with one that never leaves host memory: every loss, every gradient norm, and fingerprints of all weights and
//! optimizer state.

use crate::daemon::Daemon;
use crate::lab::Lab;

const NVME: [&str; 2] = [
    "zero_optimization.offload_param.device=nvme",
    "zero_optimization.offload_optimizer.device=nvme",
];

fn every_way_gives_the_same_bits(dtype: &str) {
    let lab = Lab::new();
    let daemon = Daemon::start(&lab);
    let plain = lab.run("none", &[dtype]);
    plain.train();
    let (losses, norms, digest) = (plain.bits("loss"), plain.bits("grad_norm"), plain.digest());
    assert_eq!(losses.len(), 6);
    let same = |run: crate::lab::Run, name: &str| {
        run.train();
        assert_eq!(run.bits("loss"), losses, "losses of {name}");
        assert_eq!(run.bits("grad_norm"), norms, "norms of {name}");
        assert_eq!(run.digest(), digest, "weights and state of {name}");
        run
    };
    let cpu = [
        "zero_optimization.offload_param.device=cpu",
        "zero_optimization.offload_optimizer.device=cpu",
    ];
    same(lab.run("cpu", &[dtype]).with(&cpu), "cpu");
    same(
        lab.run("cpu-at-once", &[dtype, "offload.schedule=at_once"])
            .with(&cpu),
        "cpu, at once",
    );
    for schedule in ["deferred", "at_once"] {
        for share in ["0", "0.5", "1"] {
            let name = format!("{schedule}-{share}");
            let sets = [
                dtype.into(),
                format!("offload.schedule={schedule}"),
                format!("offload.resident_share={share}"),
            ];
            let run = lab
                .run(&name, &[])
                .with(&sets)
                .with(&NVME)
                .with(&daemon.socket());
            let run = same(run, &name);
            let moved: u64 = run
                .metrics()
                .iter()
                .map(|line| line["device_written_bytes"].as_u64().unwrap())
                .sum();
            assert!(moved > 0, "{name} wrote nothing to its device");
        }
    }
    let mixed = [
        "zero_optimization.offload_param.device=cpu",
        "zero_optimization.offload_optimizer.device=nvme",
    ];
    same(
        lab.run("mixed", &[dtype])
            .with(&mixed)
            .with(&daemon.socket()),
        "parameters in host memory",
    );
    let rarely = ["offload.commit_every=4", "offload.resident_share=0.5"];
    same(
        lab.run("rarely", &[dtype])
            .with(&rarely)
            .with(&NVME)
            .with(&daemon.socket()),
        "a commit every 4 steps",
    );
}

#[test]
fn offload_changes_no_bit_in_fp32() {
    every_way_gives_the_same_bits("bf16.enabled=false");
}

#[test]
fn offload_changes_no_bit_in_bf16() {
    every_way_gives_the_same_bits("bf16.enabled=true");
}
