//! Groups of micro-batches: which size a plan chooses, and what it counts for it.

use super::*;
use crate::computation::ActivationCheckpointing;

/// A run of `micro_batches` micro-batches of 16,384 tokens with its state in `place`.
fn accumulating(place: &str, micro_batches: usize, changes: &[(&str, Value)]) -> RunSettings {
    let mut settings = large(place, place, changes);
    settings.batch.micro_batches = micro_batches;
    settings
}

/// One H200 whose rate is not known, so that a plan counts what is recomputed.
fn machine(drives: f64) -> Overrides {
    Overrides {
        tflops: None,
        ..h200(drives)
    }
}

fn why(plan: &Plan) -> Option<&str> {
    let mut choices = plan.choices().iter();
    let choice = choices.find(|choice| choice.key == "train.micro_batch_group");
    choice.map(|choice| choice.why.as_str())
}

fn in_one_group(place: &str, micro_batches: usize) -> RunSettings {
    let all = [("train.micro_batch_group", json!(micro_batches))];
    accumulating(place, micro_batches, &all)
}

#[test]
fn micro_batches_that_do_not_fit_together_are_grouped_and_recompute_less() {
    // The place of the update changes what crosses the bus.
    let update = ("offload.optimizer_device", json!("cpu"));
    for (place, changes) in [("none", vec![]), ("cpu", vec![update])] {
        let all = [&changes[..], &[("train.micro_batch_group", json!(16))]].concat();
        let all = plan(&accumulating(place, 16, &all), &machine(0.0));
        assert_eq!(all.checkpointing.level, ActivationCheckpointing::Full);
        assert_eq!((all.groups(), why(&all)), (1, None));
        let grouped = plan(&accumulating(place, 16, &changes), &machine(0.0));
        grouped.check().unwrap();
        assert!(grouped.groups() > 1, "{place}: {grouped}");
        assert_ne!(grouped.checkpointing.level, ActivationCheckpointing::Full);
        assert!(grouped.bound.s < all.bound.s * 0.9, "{place}: {grouped}");
        let why = why(&grouped).unwrap();
        assert!(why.contains("less is recomputed"), "{why}");
        assert_eq!(why.contains("cross the bus"), place == "cpu", "{why}");
        let shown = grouped.to_string();
        assert!(shown.contains(", gradient sums 5.0 GiB"), "{shown}");
        // Blocks are 90 % of the parameters, and each further group gathers them twice.
        let gathers = grouped.bus.up_bytes - all.bus.up_bytes;
        let blocks = 0.9 * 2.0 * grouped.params_count as f64;
        let expected = if place == "cpu" {
            blocks * 2.0 * (grouped.groups() - 1) as f64
        } else {
            0.0
        };
        assert!(
            (gathers as f64 - expected).abs() <= 0.04 * expected,
            "{gathers}, {expected}"
        );
    }
}

#[test]
fn what_fits_together_stays_together() {
    let plan = plan(&accumulating("none", 4, &[]), &machine(0.0));
    assert_eq!(plan.groups(), 1);
    assert!(why(&plan).unwrap().contains("a step is not shorter"));
    assert_eq!(plan.compute.gradient_sum_bytes, 0);
    let one = self::plan(&accumulating("none", 1, &[]), &machine(0.0));
    assert_eq!((one.groups(), why(&one)), (1, None));
}

#[test]
fn more_micro_batches_never_lower_the_planned_rate() {
    for (place, drives) in [("none", 0.0), ("cpu", 0.0), ("nvme", 1.0), ("nvme", 4.0)] {
        let rate = |micro_batches| {
            let plan = plan(&accumulating(place, micro_batches, &[]), &machine(drives));
            plan.check().unwrap();
            plan.tokens as f64 / plan.bound.s
        };
        let rates = [1, 4, 16, 64].map(rate);
        for pair in rates.windows(2) {
            assert!(
                pair[1] > 0.98 * pair[0],
                "{place}, {drives} drives: {rates:?}"
            );
        }
    }
}

#[test]
fn a_group_is_not_smaller_than_drives_and_updates_allow() {
    for drives in [1.0, 4.0] {
        let all = plan(&in_one_group("nvme", 16), &machine(drives));
        let chosen = plan(&accumulating("nvme", 16, &[]), &machine(drives));
        assert!(chosen.bound.s <= all.bound.s, "{drives}: {chosen}");
        let smallest = [("train.micro_batch_group", json!(1))];
        let smallest = plan(&accumulating("nvme", 16, &smallest), &machine(drives));
        assert!(
            chosen.bound.s <= 1.02 * smallest.bound.s,
            "{drives}: {chosen}"
        );
        // 14 bytes a parameter with one group; 2 x 2 x 90 % for each further one.
        let more = smallest.step_bytes.read_bytes() - all.step_bytes.read_bytes();
        let expected = 15.0 * 3.6 * all.params_count as f64;
        assert!((more / expected - 1.0).abs() < 0.04, "{more}, {expected}");
    }
}

#[test]
fn a_known_rate_does_not_hide_what_is_recomputed() {
    let measured = plan(&accumulating("none", 16, &[]), &h200(0.0));
    assert!(measured.groups() > 1, "{measured}");
}

#[test]
fn the_processor_takes_all_together_and_sums_in_host_memory_if_it_is_told_otherwise() {
    let machine = Overrides {
        gpu_memory_bytes: Some(0),
        host_memory_bytes: Some(512 * GIB),
        ..h200(0.0)
    };
    let of = |changes: &[(&str, Value)]| plan(&accumulating("cpu", 4, changes), &machine);
    let all = of(&[]);
    assert!(all.hardware.gpu.is_none());
    assert_eq!((all.groups(), why(&all)), (1, None));
    let two = of(&[("train.micro_batch_group", json!(2))]);
    assert_eq!(two.groups(), 2);
    assert_eq!(
        two.compute.activation_bytes,
        all.compute.activation_bytes / 2
    );
    let sums = two.compute.gradient_sum_bytes as f64 / two.params_count as f64;
    assert!((sums / 4.0 - 1.0).abs() < 0.01, "{sums}");
}
