//! Tests of units whose tiles stay in GPU memory while those of the others are in host memory.

use super::*;
use crate::computation::ActivationCheckpointing;

const FRACTION: &str = "offload.gpu_resident_fraction";

fn with(fraction: Value, memory_gib: u64) -> Plan {
    let changes = [(FRACTION, fraction)];
    let settings = large("cpu", "cpu", &changes);
    let mut hardware = known_h200(&settings, None);
    hardware.gpu.as_mut().expect("a GPU").memory_bytes = memory_gib * GIB;
    Plan::new(&settings, hardware).expect("a plan")
}

#[test]
fn what_fits_whole_is_computed_with_in_place() {
    let auto = with(json!("auto"), 139);
    let none = large("none", "none", &[]);
    let resident = Plan::new(&none, known_h200(&none, None)).unwrap();
    assert!(auto.lives_in_gpu());
    assert_eq!(auto.bound.s, resident.bound.s);
    assert_eq!(auto.gpu_bytes(), resident.gpu_bytes());
    assert_eq!(auto.host_bytes(), resident.host_bytes());
    // Left out, it is "auto".
    let mut settings = large("cpu", "cpu", &[]);
    let left_out = large("cpu", "cpu", &[(FRACTION, Value::Null)]);
    assert!(plan(&left_out, &h200(1.0)).lives_in_gpu());
    settings.offload.optimizer_device = OptimizerDevice::Cpu;
    settings.placement.gpu_resident_fraction = left_out.placement.gpu_resident_fraction;
    let on_cpu = plan(&settings, &h200(1.0));
    assert!(!on_cpu.lives_in_gpu(), "the update was to be on the CPU");
}

#[test]
fn a_part_stays_where_not_all_fits_and_the_step_is_shorter() {
    let (part, host) = (with(json!("auto"), 30), with(json!(0), 30));
    let fraction = part.gpu_fraction();
    assert!((0.1..0.9).contains(&fraction), "{fraction}");
    assert!(!part.lives_in_gpu() && !host.in_gpu.contains(&true));
    let judged_s = |plan: &Plan| plan.judged_s(&large("cpu", "cpu", &[]));
    assert!(judged_s(&part) < judged_s(&host));
    let gpu = part.hardware.gpu.as_ref().unwrap();
    assert!(part.gpu_bytes() <= gpu.memory_bytes);
    // Every tile is in one place.
    let tiles = |plan: &Plan| {
        plan.gpu_tiles.sum_bytes() + plan.host_resident_bytes() + plan.host_grad_bytes()
    };
    assert_eq!(tiles(&part), tiles(&host));
    for (streamed, kept) in part.streamed().units.iter().zip(part.kept_in_gpu().units) {
        assert!((streamed.elems == 0) != (kept.elems == 0));
    }
    assert_eq!(part.in_gpu.first(), part.in_gpu.last());
    part.check().unwrap();
}

#[test]
fn with_little_host_memory_a_part_in_front_of_drives_makes_a_step_shorter() {
    let settings = large("nvme", "nvme", &[]);
    let mut hardware = known_h200(&settings, None);
    hardware.host_memory_bytes = Some(12 * GIB);
    let places = compare_places(&settings, &hardware);
    let step_s = |wanted: Place| {
        let found = places.iter().find(|report| report.place == wanted);
        found
            .filter(|report| report.fits)
            .map(|report| report.step_s)
    };
    let with_gpu = step_s(Place::DrivesHostAndGpu).expect("a place");
    assert!(
        with_gpu < 0.9 * step_s(Place::DrivesAndHost).unwrap(),
        "{with_gpu}"
    );
    hardware.gpu = None;
    let without = compare_places(&settings, &hardware);
    assert!(
        without
            .iter()
            .all(|report| report.place != Place::DrivesHostAndGpu)
    );
}

#[test]
fn a_fraction_that_is_set_is_met_within_a_block() {
    for wanted in [0.25, 0.5, 0.9, 1.0] {
        let plan = with(json!(wanted), 139);
        let found = plan.gpu_fraction();
        assert!((found - wanted).abs() < 0.03, "{wanted}: {found}");
        assert_eq!(plan.lives_in_gpu(), wanted == 1.0);
        // The choice is the user's.
        assert!(plan.choices().iter().all(|choice| choice.key != FRACTION));
    }
}

#[test]
fn a_fraction_that_is_set_leaves_blocks_what_it_does_not_take() {
    let keeps = |fraction: f64, memory_gib: u64| {
        let plan = with(json!(fraction), memory_gib);
        plan.check().unwrap();
        plan.checkpointing
    };
    let host = keeps(0.0, 30);
    assert_eq!(
        host,
        ActivationCheckpointing::Matmuls.into(),
        "there is room for all"
    );
    let all = keeps(1.0, 30);
    assert_ne!(all, host);
    assert_eq!(keeps(1.0, 139), host);
}

#[test]
fn nothing_stays_without_being_asked_for_even_if_the_ends_are_small() {
    let few_words = [("model.vocab_size", json!(320))];
    for device in ["cpu", "nvme"] {
        let plan = plan(&large(device, device, &few_words), &h200(1.0));
        assert_eq!(plan.gpu_fraction(), 0.0, "{device}");
        assert_eq!(plan.gpu_tiles, TileSums::default());
    }
}

#[test]
fn a_run_that_fits_only_in_both_is_planned_there() {
    let layers = [("model.num_hidden_layers", json!(160))];
    let [both, host, gpu] = ["auto", "0", "none"].map(|place| {
        let device = if place == "none" { "none" } else { "cpu" };
        let fraction = if place == "auto" {
            json!("auto")
        } else {
            json!(0)
        };
        let changes = [layers[0].clone(), (FRACTION, fraction)];
        plan(
            &large(device, device, &changes),
            &Overrides {
                host_memory_bytes: Some(90 * GIB),
                gpu_memory_bytes: Some(80 * GIB),
                ..h200(1.0)
            },
        )
    });
    assert!(host.check().is_err() && gpu.check().is_err());
    both.check().unwrap();
}

#[test]
fn a_fraction_without_effect_is_refused() {
    let tree = json!({
        "train_micro_batch_size_per_gpu": 8,
        "model": {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 2},
        "data": {"files": ["text"]},
        "train": {"steps": 1, "seq_len": 64, "run_dir": "/nonexistent/run"},
        "offload": {"gpu_resident_fraction": 0.5},
    });
    let refused = check(tree, "test", None).unwrap_err().to_string();
    assert!(
        refused.contains("all of the state is in GPU memory"),
        "{refused}"
    );
}

/// The plan with all state on drives, on a GPU with `memory_gib`.
fn on_drives(changes: &[(&str, Value)], memory_gib: u64) -> (RunSettings, Plan) {
    let settings = large("nvme", "nvme", changes);
    let mut hardware = known_h200(&settings, None);
    hardware.gpu.as_mut().expect("a GPU").memory_bytes = memory_gib * GIB;
    let plan = Plan::new(&settings, hardware).expect("a plan");
    (settings, plan)
}

#[test]
fn what_stays_in_gpu_memory_is_neither_read_nor_written_but_by_commits() {
    let every = ("offload.commit_every", json!(40));
    let [none, half, all] = [0.0, 0.5, 1.0].map(|fraction| {
        let (_, plan) = on_drives(&[(FRACTION, json!(fraction)), every.clone()], 139);
        plan.check().unwrap();
        assert!(!plan.lives_in_gpu(), "the store has all");
        plan
    });
    let fraction = half.gpu_fraction();
    assert!((0.45..0.55).contains(&fraction), "{fraction}");
    for (plan, streamed) in [(&half, 1.0 - fraction), (&all, 0.0)] {
        let near = |found: f64, wanted: f64| (found - wanted).abs() <= 0.02 * wanted + 1e6;
        let [read, written] = [
            (plan.node_bytes.read_bytes(), none.node_bytes.read_bytes()),
            (plan.node_bytes.written_bytes, none.node_bytes.written_bytes),
        ];
        assert!(near(read.0, read.1 * streamed), "{read:?}");
        let committed = (1.0 - streamed) / 40.0;
        assert!(
            near(written.0, written.1 * (streamed + committed)),
            "{written:?}"
        );
        assert_eq!(
            plan.device_bytes(),
            none.device_bytes(),
            "the store has all"
        );
        assert!(plan.host_bytes() < none.host_bytes(), "gradients");
        assert!(plan.gpu_bytes() > none.gpu_bytes());
        assert!(plan.outlook().written_bytes_per_day > 0.0);
        let text = plan.overview(&large("nvme", "nvme", &[])).remove(0);
        assert!(
            text.contains("in GPU memory, of which every commit writes"),
            "{text}"
        );
    }
    // The state of each unit is in one place of memory.
    assert_eq!(all.memory.resident_bytes() + all.memory.grad_bytes(), 0);
}

#[test]
fn commits_are_as_rare_as_what_they_write_asks_for() {
    let (_, none) = on_drives(&[(FRACTION, json!(0))], 139);
    let (_, all) = on_drives(&[(FRACTION, json!("auto"))], 139);
    assert_eq!(none.swapper.commit_every, 1);
    assert_eq!(all.gpu_fraction(), 1.0, "all fits");
    let every = all.swapper.commit_every as f64;
    let commit_s = all.gpu_tiles.sum_bytes() as f64 / all.rates.write_bytes_per_s;
    assert!(every > 1.0 && all.bound.s < none.bound.s);
    assert!(
        commit_s / every <= 0.06 * all.compute_s(),
        "{commit_s} s every {every} steps"
    );
    let choice = all.choices().iter().find(|choice| choice.key == FRACTION);
    assert!(choice.unwrap().why.contains("with none of them there"));
}

#[test]
fn a_part_stays_where_a_step_is_shorter_though_every_step_is_committed() {
    let every = ("offload.commit_every", json!(1));
    let (settings, part) = on_drives(&[(FRACTION, json!("auto")), every.clone()], 30);
    let (_, none) = on_drives(&[(FRACTION, json!(0)), every], 30);
    // All is written all the same: where writes limit a step, it is not shorter, and nothing stays.
    assert_eq!(part.node_bytes.written_bytes, none.node_bytes.written_bytes);
    let gain = part.judged_s(&settings) / none.judged_s(&settings);
    assert_eq!(part.in_gpu.contains(&true), gain < 0.98, "{gain}");
    // Left out, nothing stays: every step is committed.
    let (_, left_out) = on_drives(&[(FRACTION, Value::Null)], 139);
    assert!(!left_out.in_gpu.contains(&true) && left_out.swapper.commit_every == 1);
    let (_, rare) = on_drives(&[(FRACTION, json!("auto"))], 16);
    let fraction = rare.gpu_fraction();
    assert!((0.1..0.9).contains(&fraction), "{fraction}");
    assert!(rare.gpu_bytes() <= 16 * GIB && rare.bound.s < none.bound.s);
}

#[test]
fn host_memory_goes_to_the_tiles_that_are_not_in_gpu_memory() {
    let of = |fraction: f64| {
        let budget = ("offload.host_memory_bytes", json!(12u64 << 30));
        let auto = ("offload.resident_fraction", json!("auto"));
        let (_, plan) = on_drives(&[(FRACTION, json!(fraction)), budget, auto], 139);
        plan.check().unwrap();
        plan
    };
    let [none, half] = [0.0, 0.5].map(of);
    let kept = |plan: &Plan| plan.memory.resident_bytes();
    assert!(kept(&half) > 0 && half.host_bytes() <= 12 << 30);
    // The fraction is of fewer tiles.
    assert!(half.swapper.param_fraction >= none.swapper.param_fraction);
    assert!(half.swapper.state_fraction > none.swapper.state_fraction);
    assert!(half.node_bytes.read_bytes() < 0.6 * none.node_bytes.read_bytes());
}

#[test]
fn each_of_several_ranks_keeps_its_part_of_what_stays() {
    let plan_of = |ranks: u32, fraction: Value, memory_gib: u64| {
        let changes = [(FRACTION, fraction)];
        let mut settings = large("cpu", "cpu", &changes);
        (settings.ranks, settings.local_ranks) = (ranks, ranks);
        let mut hardware = known_h200(&settings, None);
        hardware.gpu.as_mut().expect("a GPU").memory_bytes = memory_gib * GIB;
        Plan::new(&settings, hardware).expect("a plan")
    };
    let [one, two] = [1, 2].map(|ranks| plan_of(ranks, json!(0.5), 139));
    assert_eq!(one.in_gpu, two.in_gpu);
    let (all, half) = (one.gpu_tiles.sum_bytes(), two.gpu_tiles.sum_bytes());
    assert!(
        half >= all / 2 && half < all * 51 / 100,
        "{half} of {all} bytes"
    );
    // What each of two has is in one place, too.
    let host = plan_of(2, json!(0), 139);
    assert_eq!(
        half + two.host_resident_bytes() + two.host_grad_bytes(),
        host.host_resident_bytes() + host.host_grad_bytes()
    );
    // Half of the state fits where the whole does not.
    let [one, two] = [1, 2].map(|ranks| plan_of(ranks, json!("auto"), 30));
    assert!(one.gpu_fraction() < two.gpu_fraction());
    two.check().unwrap();
    assert!(plan_of(2, json!("auto"), 139).lives_in_gpu());
}

#[test]
fn parts_that_are_small_are_cut_on_every_node() {
    // Of a block, later nodes have no tile; of the embedding all have.
    let changes = [
        (FRACTION, json!(0.9)),
        ("model.vocab_size", json!(128_256)),
        ("model.hidden_size", json!(512)),
        ("model.intermediate_size", json!(1024)),
        ("model.num_hidden_layers", json!(2)),
    ];
    let mut settings = large("cpu", "cpu", &changes);
    (settings.ranks, settings.local_ranks) = (32, 8);
    let plan = Plan::new(&settings, known_h200(&settings, None)).expect("a plan");
    assert!(plan.in_gpu.contains(&true) && plan.in_gpu.contains(&false));
    for (rank, local) in [(0, 0..8), (31, 24..32)] {
        for mut part in [plan.streamed(), plan.kept_in_gpu()] {
            (part.rank, part.node_ranks) = (rank, Some(local.clone()));
            part.cut().unwrap();
        }
    }
}
