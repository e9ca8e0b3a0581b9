//! Fp16 with a scaled loss, and steps whose gradients are not finite.
//!
//! Errors that these tests find: a scaled gradient is not divided by the scale, or its norm is clipped
//! before; a step that overflowed changes a weight, a moment, or the count for bias correction and learning
//! rate; the scale is not resumed; ranks decide differently; a hopeless run never ends.

use crate::harness::{Harness, Run, succeed};

const FP16: &str = "fp16.enabled=true";

/// The initial scale is too large: some steps overflow, then the run learns.
const TOO_LARGE: [&str; 4] = [
    FP16,
    "fp16.initial_scale_power=22",
    "fp16.hysteresis=1",
    "train.steps=14",
];

fn numbers(run: &Run, key: &str) -> Vec<f64> {
    let metrics = run.metrics();
    // Null if it is not finite.
    let number = |line: &serde_json::Value| line[key].as_f64().unwrap_or(f64::NAN);
    metrics.iter().map(number).collect()
}

/// Returns which steps changed nothing.
fn skipped(run: &Run) -> Vec<bool> {
    let metrics = run.metrics();
    metrics.iter().map(|line| line["skipped"] == true).collect()
}

/// Fingerprint of the tiles without the step.
fn tiles(run: &Run) -> String {
    let fingerprint = run.fingerprint();
    fingerprint.lines().skip(1).collect::<Vec<_>>().join("\n")
}

#[test]
fn fp16_learns_like_fp32_with_one_rank_or_two() {
    let harness = Harness::new();
    let sets = [
        "train.steps=20",
        "train_batch_size=8",
        "gradient_clipping=0.5",
    ];
    let wide = harness.run("fp32", &sets);
    wide.train();
    let check = |narrow: &Run| {
        assert_eq!(skipped(narrow), [false; 20]);
        for key in ["loss", "grad_norm"] {
            let pairs = numbers(narrow, key).into_iter().zip(numbers(&wide, key));
            for (step, (narrow, wide)) in pairs.enumerate() {
                let off = ((narrow - wide) / wide).abs();
                assert!(
                    off < 0.01,
                    "{key} of step {}: {narrow}, not {wide}",
                    step + 1
                );
            }
        }
    };
    let adaptive = harness
        .run("adaptive", &sets)
        .with(&[FP16, "fp16.initial_scale_power=10"]);
    let said = adaptive.train();
    assert!(said.contains("precision fp16, scaled losses"), "{said}");
    assert_eq!(numbers(&adaptive, "loss_scale"), [1024.0; 20]);
    check(&adaptive);
    let ranks = harness
        .run("ranks", &sets)
        .with(&[FP16, "fp16.loss_scale=512"]);
    succeed(ranks.launch(2));
    assert_eq!(numbers(&ranks, "loss_scale"), [512.0; 20]);
    check(&ranks);
}

#[test]
fn a_step_that_overflows_changes_nothing_and_lowers_the_scale() {
    let harness = Harness::new();
    let run = |until: u64| {
        let until = format!("train.stop_after={until}");
        harness.run("run", &TOO_LARGE).with(&[until])
    };
    let said = run(1).train();
    assert!(
        said.contains("skipped: its gradients are not finite; the weights are unchanged, the loss scale changes from 4194304 to 2097152"),
        "{said}"
    );
    let fresh = tiles(&run(1));
    run(2).train();
    let both = run(2);
    assert_eq!(skipped(&both), [true, true]);
    assert_eq!(tiles(&both), fresh, "not a bit changed");
    run(14).train();
    let all = run(14);
    let skipped = skipped(&all);
    let count = skipped.iter().filter(|skipped| **skipped).count();
    assert!((2..12).contains(&count) && !skipped[13], "{skipped:?}");
    assert_ne!(tiles(&all), fresh);
    // The optimizer's first step is the first one that is not skipped: it has the schedule's initial rate.
    let (rates, losses) = (numbers(&all, "lr"), numbers(&all, "loss"));
    assert!(
        rates[..=count + 1].iter().all(|rate| *rate == 0.0),
        "{rates:?}"
    );
    assert!(rates[count + 2] > 0.0, "{rates:?}");
    assert!(losses[13] < losses[0] - 0.02, "{losses:?}");
    let scales = numbers(&all, "loss_scale");
    assert_eq!(scales[0] / scales[13], (count as f64).exp2());
}

#[test]
fn a_step_that_is_skipped_moves_no_state() {
    let harness = Harness::new();
    // With immediate updates, everything that an update moves is counted in its own step.
    let sets = [
        "offload.optimizer_step=immediate",
        "offload.staging_bytes=150000",
    ];
    let run = harness
        .run("run", &TOO_LARGE)
        .with(&harness.nvme())
        .with(&sets);
    run.train();
    let state_bytes = |read: &str, grads: &str| -> Vec<f64> {
        let pairs = numbers(&run, read).into_iter().zip(numbers(&run, grads));
        pairs.map(|(all, grads)| all - grads).collect()
    };
    let written = state_bytes("device_written_bytes", "device_grad_written_bytes");
    let read = state_bytes("device_read_bytes", "device_grad_read_bytes");
    let skipped = skipped(&run);
    let updates = skipped.iter().position(|skipped| !skipped).unwrap();
    assert!(updates > 1 && written[updates] > 0.0, "{skipped:?}");
    for step in 0..updates {
        assert_eq!(written[step], 0.0, "step {} wrote {written:?}", step + 1);
        assert!(
            read[step] < read[updates],
            "step {} read {read:?}",
            step + 1
        );
    }
}

#[test]
fn overflows_do_not_depend_on_the_place_of_tiles_or_on_resuming() {
    let harness = Harness::new();
    let whole = harness.run("whole", &TOO_LARGE);
    whole.train();
    // The smallest staging for a separate master and the moments.
    let staging = ["offload.staging_bytes=150000"];
    let parts = || {
        harness
            .run("parts", &TOO_LARGE)
            .with(&harness.nvme())
            .with(&staging)
    };
    for until in [1, 3, 9, 14] {
        parts().with(&[format!("train.stop_after={until}")]).train();
    }
    for key in ["loss_scale", "lr"] {
        assert_eq!(parts().bits(key), whole.bits(key), "{key}");
    }
    let bits = |run: &Run| {
        numbers(run, "loss")
            .iter()
            .map(|loss| loss.to_bits())
            .collect::<Vec<_>>()
    };
    assert_eq!(bits(&parts()), bits(&whole));
    assert_eq!(tiles(&parts()), tiles(&whole));
}

#[test]
fn a_run_whose_scale_cannot_go_lower_ends() {
    let harness = Harness::new();
    let hopeless = [
        "fp16.initial_scale_power=32",
        "fp16.min_loss_scale=2147483648",
    ];
    let run = harness.run("run", &TOO_LARGE).with(&hopeless);
    let text = run.refused();
    for part in [
        "step 2: gradients are not finite",
        "2147483648 (fp16.min_loss_scale)",
        "The state of step 1 was kept",
    ] {
        assert!(text.contains(part), "{text}");
    }
    assert!(run.fingerprint().starts_with("step 1\n"));
}

#[test]
fn bf16_stops_at_an_overflow_or_skips_it_by_policy() {
    let harness = Harness::new();
    let wild = [
        "bf16.enabled=true",
        "optimizer.params.lr=1e38",
        "scheduler={}",
        "gradient_clipping=0",
    ];
    let text = harness.run("stops", &wild).refused();
    assert!(text.contains("training diverged"), "{text}");
    let skips = harness
        .run("skips", &wild)
        .with(&["bf16.check_grad_overflow=true"]);
    let said = skips.train();
    assert!(
        said.contains("skipped: its gradients are not finite; the weights are unchanged"),
        "{said}"
    );
    let skipped = skipped(&skips);
    assert!(!skipped[0] && skipped[5], "{skipped:?}");
}
