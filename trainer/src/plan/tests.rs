//! Whole plans, at the figures of a Llama of 1.345 G parameters. What could go wrong: memory is counted twice or not at all,
//! a choice does not fit the memory it was made for, a run that cannot work is let through.

use serde_json::{Value, json};

use super::choose::STAGING_BYTES_ASSUMED;
use super::*;
use crate::config::{RunSettings, check};
use crate::model::HfModel;

const GIB: u64 = 1 << 30;

/// 1.345 G parameters, 16k tokens a step, bf16.
fn large(param: &str, optimizer: &str, changes: &[(&str, Value)]) -> RunSettings {
    let mut tree = json!({
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": true},
        "zero_optimization": {
            "offload_param": {"device": param},
            "offload_optimizer": {"device": optimizer},
        },
        "model": {
            "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5504,
            "num_hidden_layers": 24, "num_attention_heads": 16
        },
        "data": {"files": ["text"]},
        "train": {"steps": 100, "seq_len": 2048, "run_folder": "/nonexistent/run"},
        "offload": {}
    });
    for (key, place) in [(param, "offload_param"), (optimizer, "offload_optimizer")] {
        if key == "nvme" {
            tree["zero_optimization"][place]["nvme_path"] = json!(["/nvme0"]);
        }
    }
    for (path, value) in changes {
        let (table, key) = path.split_once('.').expect("a table and a key");
        tree[table][key] = value.clone();
    }
    let ranks = ranks_of(&mut tree);
    check(tree, "test", ranks).expect("settings")
}

/// Processes of the run, by a key that only these tests have.
fn ranks_of(tree: &mut Value) -> Option<u32> {
    let ranks = tree["train"].as_object_mut()?.remove("ranks")?;
    Some(ranks.as_u64()? as u32)
}

/// A machine with one H200 and `drives` drives of 6.2 and 3.2 GB/s.
fn h200(drives: f64) -> Overrides {
    Overrides {
        host_memory_bytes: Some(128 * GIB),
        gpu_memory_bytes: Some(139 * GIB),
        read_bytes_per_s: Some(drives * 6.2e9),
        write_bytes_per_s: Some(drives * 3.2e9),
        cores: Some(16),
        tflops: Some(305.0),
        ..Overrides::default()
    }
}

fn plan(settings: &RunSettings, machine: &Overrides) -> Plan {
    Plan::new(settings, Hardware::new(settings, machine)).expect("a plan")
}

/// The messages of everything that is refused.
fn refused(settings: &RunSettings, machine: &Overrides) -> String {
    let plan = plan(settings, machine);
    assert!(plan.check().is_err(), "must be refused");
    let problems: Vec<String> = plan.problems().iter().map(ToString::to_string).collect();
    problems.join("\n")
}

fn tflops(plan: &Plan) -> f64 {
    plan.report().bound.tflops
}

#[test]
fn all_state_on_drives_is_bound_by_their_writes() {
    let settings = large("nvme", "nvme", &[]);
    for (drives, least, most, staging) in [(1.0, 26.0, 31.0, 1.4e9), (4.0, 104.0, 126.0, 5e9)] {
        let plan = plan(&settings, &h200(drives));
        plan.check().unwrap();
        assert!((least..most).contains(&tflops(&plan)), "{}", tflops(&plan));
        assert_eq!(plan.bound.wall, swapper::Wall::Writes);
        assert_eq!(plan.bound.terms[0].what, "W/w", "staging is no wall");
        let chosen = plan.memory.staging_bytes() as f64;
        assert!((0.8..1.1).contains(&(chosen / staging)), "{chosen}");
        assert_eq!(plan.swapper.commit_every, 1);
        assert_eq!(plan.update, UpdatePlace::Cpu);
        assert_eq!(plan.gpu_tiles, TileSums::default());
        let params = plan.params_count as f64;
        assert!((plan.step_bytes.written_bytes / params - 12.0).abs() < 0.1);
        assert!((plan.step_bytes.read_bytes() / params - 14.0).abs() < 0.1);
    }
}

#[test]
fn parameters_at_home_are_committed_every_few_steps() {
    let plan = plan(&large("cpu", "nvme", &[]), &h200(1.0));
    assert_eq!(plan.swapper.commit_every, 4);
    let params = plan.params_count as f64;
    assert!((plan.step_bytes.written_bytes / params - 10.5).abs() < 0.1);
    let given = [("offload.commit_every", json!(0))];
    let plan = self::plan(&large("cpu", "nvme", &given), &h200(1.0));
    assert_eq!(plan.swapper.commit_every, 0);
    assert!(
        !plan
            .choices()
            .iter()
            .any(|c| c.key == "offload.commit_every")
    );
}

#[test]
fn in_host_memory_the_update_goes_where_it_makes_the_step_shorter() {
    let host = plan(&large("cpu", "cpu", &[]), &h200(1.0));
    assert_eq!(host.update, UpdatePlace::Shared);
    assert_eq!(host.device_bytes(), 0);
    assert_eq!(host.step_bytes, StepBytes::default());
    // Weights, state and gradients, and nothing of the computing.
    let tile_bytes = 14.0 * host.params_count as f64;
    assert!((host.host_bytes() as f64 / tile_bytes - 1.0).abs() < 0.03);
    let on_cpu = [("offload.update", json!("cpu"))];
    let on_cpu = plan(&large("cpu", "cpu", &on_cpu), &h200(1.0));
    assert_eq!(on_cpu.update, UpdatePlace::Cpu);
    assert!(on_cpu.bound.s > host.bound.s);
    // 0.434 s at 424 TFLOPS and 6.7 G parameters/s, says the design; here 305 and 5.6.
    assert!(
        (on_cpu.bound.s - (0.325 + 0.24)).abs() < 0.01,
        "{}",
        on_cpu.bound.s
    );
    // Weights up twice, gradients down once.
    assert_eq!(on_cpu.bus.up_bytes, 2 * on_cpu.bus.down_bytes);
    assert!(host.bus.up_bytes > on_cpu.bus.up_bytes);
}

#[test]
fn device_none_is_gpu_memory_where_there_is_a_gpu() {
    let settings = large("none", "none", &[]);
    let plan = plan(&settings, &h200(1.0));
    plan.check().unwrap();
    assert_eq!(plan.update, UpdatePlace::Gpu);
    assert!(plan.host_bytes() < GIB, "no tile is in host memory");
    assert!(plan.gpu_bytes() > 14 * plan.params_count);
    assert_eq!(plan.bus, BusBytes::default());
    assert!((tflops(&plan) - 305.0).abs() < 1.0);
    let without = Overrides {
        gpu_memory_bytes: Some(0),
        ..h200(1.0)
    };
    let plan = self::plan(&settings, &without);
    assert_eq!((plan.gpu_bytes(), plan.update), (0, UpdatePlace::Cpu));
    assert!(plan.host_bytes() > 14 * plan.params_count);
    // Only one of them none: host memory, on a GPU too.
    let plan = self::plan(&large("none", "cpu", &[]), &h200(1.0));
    assert!(plan.host_bytes() > 13 * plan.params_count);
    assert_eq!(plan.gpu_tiles, TileSums::default());
}

#[test]
fn what_a_gpu_has_left_keeps_results_of_products() {
    let settings = large("cpu", "cpu", &[]);
    let keep = |gib: u64, settings: &RunSettings| {
        let machine = Overrides {
            gpu_memory_bytes: Some(gib * GIB),
            ..h200(1.0)
        };
        let plan = plan(settings, &machine);
        assert!(plan.check().is_err() || plan.gpu_bytes() <= gib * GIB);
        plan.keep
    };
    assert_eq!(keep(139, &settings), Keep::Products);
    assert_eq!(keep(20, &settings), Keep::Attention);
    assert_eq!(keep(10, &settings), Keep::Nothing);
    let given = large("cpu", "cpu", &[("train.keep", json!("nothing"))]);
    assert_eq!(keep(139, &given), Keep::Nothing);
    // 0.7 GB a block at 16k tokens of hidden size 2048.
    let plan = plan(&settings, &h200(1.0));
    let block_bytes = plan.compute.kept_bytes as f64 / 24.0;
    assert!((0.6e9..0.8e9).contains(&block_bytes), "{block_bytes}");
    let too_much = large("cpu", "cpu", &[("train.keep", json!("products"))]);
    let small = Overrides {
        gpu_memory_bytes: Some(16 * GIB),
        ..h200(1.0)
    };
    assert!(refused(&too_much, &small).contains("set train.keep = \"auto\""));
}

#[test]
fn a_form_of_block_that_is_not_written_out_keeps_nothing_and_says_so() {
    let of = |model: Value, more: &[(&str, Value)]| {
        let mut settings = large("cpu", "cpu", more);
        settings.model = HfModel::from_json(&model.to_string()).unwrap().config;
        plan(&settings, &h200(1.0))
    };
    let mistral = |window: u64| {
        json!({"model_type": "mistral", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5504,
            "num_hidden_layers": 24, "num_attention_heads": 16, "sliding_window": window})
    };
    assert_eq!(of(mistral(2048), &[]).keep, Keep::Products);
    for keep in ["auto", "products"] {
        let plan = of(mistral(1024), &[("train.keep", json!(keep))]);
        assert_eq!((plan.keep, plan.compute.kept_bytes), (Keep::Nothing, 0));
        let chosen = plan
            .choices
            .iter()
            .find(|choice| choice.key == "train.keep");
        assert!(chosen.expect("it says so").why.contains("computed again"));
    }
}

#[test]
fn attentions_weights_are_counted_where_some_are_left_out() {
    let mut settings = large("cpu", "cpu", &[]);
    let before = plan(&settings, &h200(1.0)).compute.working_bytes;
    settings.dropout.attention = 0.1;
    let after = plan(&settings, &h200(1.0)).compute.working_bytes;
    // 8 sequences, 16 heads, 2048 x 2048, fp32, some copies.
    let weights_bytes = 8 * 16 * 2048 * 2048 * 4;
    assert!(after > before + 4 * weights_bytes, "{before}, {after}");
}

#[test]
fn a_budget_of_host_memory_is_used_up_and_kept_to() {
    let mut before = 0;
    for gib in [6, 8, 12, 16, 24] {
        let budget = [("offload.host_memory", json!(format!("{gib}GiB")))];
        let plan = plan(&large("nvme", "nvme", &budget), &h200(4.0));
        plan.check().unwrap();
        let host_bytes = plan.host_bytes();
        assert!(host_bytes <= gib * GIB, "{host_bytes} of {gib} GiB");
        assert!(host_bytes > before);
        before = host_bytes;
        let (param, state) = (plan.swapper.param_share, plan.swapper.state_share);
        assert!(
            param == 1.0 || state == 0.0,
            "parameters first: {param}, {state}"
        );
        if gib < 24 {
            let tile = plan.memory.state_slot_bytes + plan.memory.staging_bytes();
            assert!(host_bytes + tile >= gib * GIB, "{host_bytes} of {gib} GiB");
        } else {
            assert_eq!((param, state), (1.0, 1.0), "all of it fits");
            assert_eq!(plan.memory.staging_bytes(), 0);
        }
        let every = plan.swapper.commit_every;
        assert_eq!(
            every > 1,
            gib > 6,
            "commits of {gib} GiB every {every} steps"
        );
    }
}

#[test]
fn staging_takes_no_more_than_host_memory_has_left() {
    let machine = Overrides {
        host_memory_bytes: Some(4 * GIB),
        ..h200(4.0)
    };
    let plan = plan(&large("nvme", "nvme", &[]), &machine);
    plan.check().unwrap();
    assert!(plan.memory.staging_bytes() < 2 * GIB);
    assert_eq!(plan.bound.terms[0].what, "t_bwd + (W-S)/w");
    assert!(
        plan.to_string()
            .contains("the step would be shorter with more")
    );
}

#[test]
fn gradients_stay_while_they_fit_and_then_as_many_as_do() {
    let params = 1.345e9;
    let mut before = 0.0;
    for gib in [1, 2, 3, 8] {
        let budget = [("offload.host_memory", json!(format!("{gib}GiB")))];
        let settings = large("nvme", "nvme", &budget);
        let plan = plan(&settings, &h200(4.0));
        plan.check().unwrap();
        assert!(plan.host_bytes() <= gib * GIB);
        let share = plan.swapper.grad_share;
        assert!(share > before || share == 1.0, "{share} of {gib} GiB");
        assert_eq!(share == 1.0, gib >= 3, "{gib} GiB");
        before = share;
        // Each that goes costs two bytes read and two written, and room on devices once.
        let gone = (1.0 - share) * params;
        let bytes = &plan.step_bytes;
        assert!((bytes.grad_written_bytes - 2.0 * gone).abs() < 0.01 * params);
        assert_eq!(plan.memory.scratch_bytes as f64, bytes.grad_written_bytes);
        if share < 1.0 {
            let written = bytes.written_bytes - bytes.grad_written_bytes;
            assert!((written / params - 12.0).abs() < 0.1, "nothing else stays");
        }
        let chosen = plan.choices().iter().find(|c| c.key == "offload.gradients");
        assert_eq!(chosen.is_some(), share < 1.0);
    }
    let given = |place: &str| {
        let settings = large("nvme", "nvme", &[("offload.gradients", json!(place))]);
        plan(&settings, &h200(1.0))
    };
    let (kept, spilled) = (given("cpu"), given("nvme"));
    assert_eq!(spilled.host_grad_bytes(), 0);
    let more = |of: fn(&Plan) -> f64| of(&spilled) - of(&kept);
    assert!((more(|p| p.step_bytes.read_bytes()) / params - 2.0).abs() < 0.01);
    assert!((more(|p| p.step_bytes.written_bytes) / params - 2.0).abs() < 0.01);
    assert!((more(|p| p.device_bytes() as f64) / params - 2.0).abs() < 0.01);
}

#[test]
fn blocks_inputs_go_to_host_memory_when_the_gpu_is_too_small_for_them() {
    let plan_of = |bytes: u64, changes: &[(&str, Value)]| {
        let machine = Overrides {
            gpu_memory_bytes: Some(bytes),
            ..h200(1.0)
        };
        plan(&large("cpu", "cpu", changes), &machine)
    };
    let given = |place: &str| {
        let least = ("train.keep", json!("nothing"));
        plan_of(141 * GIB, &[least, ("train.activations", json!(place))])
    };
    let (here, there) = (given("device"), given("host"));
    // 24 blocks of 16k tokens of 2048 numbers: what the GPU has less, host memory has more, and the bus carries twice.
    let away = 24 * 16384 * 2048 * 2;
    assert_eq!(
        (here.compute.away_bytes, there.compute.away_bytes),
        (0, away)
    );
    assert_eq!(there.host_bytes() - here.host_bytes(), away);
    let less = here.gpu_bytes() - there.gpu_bytes();
    assert!(less > away * 8 / 10 && less < away, "{less} of {away}");
    assert_eq!(there.bus.up_bytes - here.bus.up_bytes, away);
    assert_eq!(there.bus.down_bytes - here.bus.down_bytes, away);

    // Too small for all of them, with the tenth that choices leave.
    let small = (here.gpu_bytes() + there.gpu_bytes()) / 2 * 10 / 9;
    let chosen = |plan: &Plan| plan.choices().iter().any(|c| c.key == "train.activations");
    let (large_gpu, small_gpu) = (plan_of(141 * GIB, &[]), plan_of(small, &[]));
    small_gpu.check().unwrap();
    assert!(small_gpu.inputs_away && chosen(&small_gpu));
    assert!(!large_gpu.inputs_away && !chosen(&large_gpu));
    assert!(
        small_gpu.to_string().contains("blocks' inputs 1.5 GiB"),
        "{small_gpu}"
    );
    // Asked to stay where they do not fit, they are refused.
    let machine = Overrides {
        gpu_memory_bytes: Some(there.gpu_bytes()),
        ..h200(1.0)
    };
    let stay = large("cpu", "cpu", &[("train.activations", json!("device"))]);
    let text = refused(&stay, &machine);
    assert!(text.contains("of GPU memory"), "{text}");
}

#[test]
fn what_nobody_measured_is_called_assumed() {
    let settings = large("nvme", "nvme", &[]);
    let unknown = Overrides {
        read_bytes_per_s: None,
        tflops: None,
        ..h200(1.0)
    };
    let plan = plan(&settings, &unknown);
    let text = plan.to_string();
    assert!(
        text.contains("devices reading 6.20 GB/s (assumed) and writing 3.20 GB/s (given)"),
        "{text}"
    );
    assert_eq!(plan.hardware.tflops.source, Source::Assumed);
    assert!(plan.memory.staging_bytes() as f64 > 0.97 * STAGING_BYTES_ASSUMED as f64);
}

#[test]
fn what_does_not_fit_is_refused_with_what_to_change() {
    let small_gpu = Overrides {
        gpu_memory_bytes: Some(16 * GIB),
        ..h200(1.0)
    };
    let text = refused(&large("none", "none", &[]), &small_gpu);
    assert!(
        text.contains(
            "of GPU memory, 16.0 GiB is available: set zero_optimization.offload_param.device = \"cpu\" and zero_optimization.offload_optimizer.device = \"cpu\": it fits then, at "
        ),
        "{text}"
    );
    let tiny_gpu = Overrides {
        gpu_memory_bytes: Some(2 * GIB),
        ..h200(1.0)
    };
    let text = refused(&large("cpu", "cpu", &[]), &tiny_gpu);
    assert!(
        text.contains("lower train_micro_batch_size_per_gpu"),
        "{text}"
    );
    let small_host = Overrides {
        host_memory_bytes: Some(8 * GIB),
        ..h200(1.0)
    };
    let text = refused(&large("cpu", "cpu", &[]), &small_host);
    assert!(
        text.contains("of host memory, 8.0 GiB is available: set zero_optimization.offload_param.device = \"nvme\" with"),
        "{text}"
    );
    let budget = [
        ("offload.host_memory", json!("2GiB")),
        ("offload.gradients", json!("cpu")),
    ];
    let text = refused(&large("nvme", "nvme", &budget), &h200(1.0));
    assert!(
        text.contains("2.0 GiB is what offload.host_memory allows"),
        "{text}"
    );
}

#[test]
fn a_gpu_that_is_not_there_is_refused() {
    let without = Overrides {
        gpu_memory_bytes: Some(0),
        ..h200(1.0)
    };
    for (key, value, part) in [
        (
            "train.device",
            "gpu",
            "train.device is \"gpu\", and there is none",
        ),
        (
            "offload.update",
            "gpu",
            "offload.update is \"gpu\", and there is no GPU",
        ),
        (
            "offload.update",
            "shared",
            "offload.update is \"shared\", and there is no GPU",
        ),
    ] {
        let changes = [(key, json!(value))];
        let text = refused(&large("cpu", "cpu", &changes), &without);
        assert!(text.contains(part), "{text}");
        plan(&large("cpu", "cpu", &changes), &h200(1.0))
            .check()
            .unwrap();
    }
    // With everything in its memory the update has no choice.
    let changes = [("offload.update", json!("cpu"))];
    let text = refused(&large("none", "none", &changes), &h200(1.0));
    assert!(
        text.contains("the state lives in GPU memory: leave it out"),
        "{text}"
    );
}

#[test]
fn ranks_share_state_drives_and_host_memory() {
    let machine = Overrides {
        cores: Some(64),
        ..h200(4.0)
    };
    let of = |ranks: u32| {
        let ranks = [("train.ranks", json!(ranks))];
        plan(&large("nvme", "nvme", &ranks), &machine)
    };
    let (one, four) = (of(1), of(4));
    assert_eq!(four.tokens, 4 * one.tokens);
    let ratio = |of: fn(&Plan) -> f64| of(&four) / of(&one);
    assert!((ratio(|plan| plan.node_bytes.written_bytes) - 1.0).abs() < 0.02);
    assert!((ratio(|plan| plan.step_bytes.written_bytes) - 0.25).abs() < 0.01);
    assert!((ratio(|plan| plan.memory.grad_bytes() as f64) - 0.25).abs() < 0.01);
    // The same bytes on the same drives, four times the tokens.
    assert!((tflops(&four) / tflops(&one) - 4.0).abs() < 0.1);
}

#[test]
fn the_report_has_the_names_that_others_read() {
    let report =
        serde_json::to_value(plan(&large("nvme", "nvme", &[]), &h200(1.0)).report()).unwrap();
    for (path, is) in [
        ("/version", json!(1)),
        ("/fits", json!(true)),
        ("/problems", json!([])),
        ("/tokens_per_step", json!(16384)),
        ("/chosen/commit_every", json!(1)),
        ("/chosen/schedule", json!("deferred")),
        ("/chosen/update", json!("cpu")),
        ("/chosen/param_share", json!(0.0)),
        ("/bound/wall", json!("device writes")),
        ("/bound/terms/0/what", json!("W/w")),
        ("/hardware/read_bytes_per_s/source", json!("given")),
        ("/ranks", json!(1)),
    ] {
        assert_eq!(report.pointer(path), Some(&is), "{path}");
    }
    for path in [
        "/parameters",
        "/device_bytes",
        "/host/process_bytes",
        "/host/staging_bytes",
        "/gpu/process_bytes",
        "/gpu/compute/working_bytes",
        "/step/forward_read_bytes",
        "/step/written_bytes",
        "/step/bus_process/up_bytes",
        "/bound/s",
        "/bound/tokens_per_s",
        "/bound/tflops",
        "/bound/update_s",
        "/chosen/staging_bytes",
        "/chosen/tile_elems",
        "/chosen/state_tile_bytes",
    ] {
        let number = report.pointer(path).and_then(Value::as_f64);
        assert!(
            number.is_some_and(|number| number > 0.0),
            "{path}: {number:?}"
        );
    }
}

#[test]
fn each_stage_counts_what_its_ranks_hold() {
    const STAGE: &str = "zero_optimization.stage";
    let machine = h200(0.0);
    let of = |stage: u64| {
        let changes = [(STAGE, json!(stage)), ("train.ranks", json!(4))];
        let plan = plan(&large("none", "none", &changes), &machine);
        (plan.gpu_tiles, plan.compute)
    };
    let [zero, one, two, three] = [0, 1, 2, 3].map(of);
    // 2 bytes a parameter, padded and not.
    let all = 2 * 1_345_000_000u64;
    let about = |bytes: u64, of: u64| bytes.abs_diff(of) < of / 20;
    // Tiles: all of them, or a quarter. State has 10 bytes where parameters have 2.
    assert!(about(zero.0.param_bytes, all) && about(zero.0.state_bytes, 5 * all));
    for (tiles, _) in [one, two, three] {
        assert!(about(tiles.param_bytes, all / 4) && about(tiles.state_bytes, 5 * all / 4));
    }
    // Weights: whole, or some units of them.
    for (_, compute) in [zero, one, two] {
        assert!(about(compute.unit_buffer_bytes, all), "{compute:?}");
    }
    assert!(three.1.unit_buffer_bytes < all / 4);
    // Gradients on their way: whole, or some units of them.
    for (_, compute) in [zero, one] {
        assert!(about(compute.grad_buffer_bytes, all), "{compute:?}");
    }
    for (_, compute) in [two, three] {
        assert!(compute.grad_buffer_bytes < all / 4, "{compute:?}");
    }
    // Several micro-batches are summed in fp32 until the end.
    let several = [(STAGE, json!(1)), ("train.ranks", json!(4))];
    let mut settings = large("none", "none", &several);
    settings.batch.micro_batches = 4;
    let waiting = plan(&settings, &machine).compute.grad_buffer_bytes;
    assert!(about(waiting, 3 * all), "{waiting}");
}

#[test]
fn weights_cross_the_bus_once_below_stage_3() {
    let up = |stage: u64| {
        let changes = [
            ("zero_optimization.stage", json!(stage)),
            ("offload.update", json!("cpu")),
        ];
        plan(&large("none", "cpu", &changes), &h200(0.0))
            .bus
            .up_bytes
    };
    assert_eq!((up(1), up(2)), (up(2), up(3) / 2));
}

#[test]
fn a_run_that_does_not_fit_is_told_a_change_with_which_it_does() {
    // Kept to what was asked: the largest micro-batch of the same step that fits.
    let here = [
        ("train.keep", json!("nothing")),
        ("train.activations", json!("device")),
    ];
    let mut in_host = large("cpu", "cpu", &here);
    let needs = |micro_batch: usize| {
        let mut split = large("cpu", "cpu", &here);
        (split.batch.micro_batch, split.batch.micro_batches) = (micro_batch, 32 / micro_batch);
        plan(&split, &h200(1.0)).gpu_bytes()
    };
    assert!(needs(8) < needs(16) && needs(16) < needs(32));
    (in_host.batch.micro_batch, in_host.batch.micro_batches) = (32, 1);
    let tight = Overrides {
        gpu_memory_bytes: Some(needs(8)),
        ..h200(1.0)
    };
    let text = refused(&in_host, &tight);
    assert!(
        text.contains("set train_micro_batch_size_per_gpu = 8 with gradient_accumulation_steps = 4: it fits then"),
        "{text}"
    );

    // What a drive must hold, it is told to; the advice of a place that fits nowhere is less work a step.
    let small_host = Overrides {
        host_memory_bytes: Some(6 * GIB),
        ..h200(1.0)
    };
    let in_host = large("cpu", "cpu", &[]);
    let text = refused(&in_host, &small_host);
    assert!(
        text.contains("offload_optimizer.device = \"nvme\" with an nvme_path: it fits then"),
        "{text}"
    );
    let tiny = Overrides {
        gpu_memory_bytes: Some(3 * GIB),
        ..h200(1.0)
    };
    let text = refused(&in_host, &tiny);
    assert!(
        text.contains("set train_micro_batch_size_per_gpu = 1 with gradient_accumulation_steps = "),
        "{text}"
    );
}

#[test]
fn time_and_wear_follow_from_the_bound() {
    let machine = Overrides {
        drives_count: Some(4),
        drive_rating_bytes: Some(600_000_000_000_000),
        ..h200(4.0)
    };
    let plan = plan(&large("nvme", "nvme", &[]), &machine);
    let outlook = plan.outlook();
    assert_eq!((outlook.steps, outlook.tokens), (100, 100 * 16384));
    assert!((outlook.run_s - 100.0 * plan.bound.s).abs() < 1e-9);
    // Drives that write all the time: 12.8 GB/s for a day.
    assert!((outlook.written_bytes_per_day / (12.8e9 * 86400.0) - 1.0).abs() < 1e-3);
    // 600 TB each at 3.2 GB/s each.
    let rating_s = outlook.rating_s.unwrap();
    assert!(
        (rating_s / (600e12 / 3.2e9) - 1.0).abs() < 1e-3,
        "{rating_s}"
    );
    let text = plan.to_string();
    assert!(
        text.contains("wear      1106 TB written a day at most"),
        "{text}"
    );
    assert!(
        text.contains("over 4 drives; what they are rated for lasts 2.17 days"),
        "{text}"
    );
    let in_host = self::plan(&large("cpu", "cpu", &[]), &machine);
    assert_eq!(in_host.outlook().rating_s, None);
    assert!(!in_host.to_string().contains("wear"));
}

#[test]
fn each_place_is_planned_as_a_run_with_its_state_there() {
    let settings = large("none", "none", &[]);
    let hardware = Hardware::new(&settings, &h200(1.0));
    let all = places(&settings, &hardware);
    assert_eq!(
        all.iter().map(|report| report.place).collect::<Vec<_>>(),
        Place::ALL
    );
    for (report, tiers) in all.iter().zip([
        ("none", "none"),
        ("cpu", "cpu"),
        ("cpu", "nvme"),
        ("nvme", "nvme"),
        ("nvme", "nvme"),
    ]) {
        let mut settings = large(tiers.0, tiers.1, &[]);
        if report.place == Place::DrivesAndHost {
            settings.placement.resident_share = crate::config::ResidentShare::Auto;
        }
        let alone = plan(&settings, &h200(1.0));
        assert_eq!(report.gpu_bytes, alone.gpu_bytes(), "{:?}", report.place);
        assert_eq!(report.host_bytes, alone.host_bytes(), "{:?}", report.place);
        assert_eq!(
            report.device_bytes,
            alone.device_bytes(),
            "{:?}",
            report.place
        );
        assert_eq!(report.step_s, alone.bound.s, "{:?}", report.place);
        assert!(report.fits);
    }
    let without = Overrides {
        gpu_memory_bytes: Some(0),
        ..h200(1.0)
    };
    let all = places(&settings, &Hardware::new(&settings, &without));
    assert!(
        all.iter()
            .all(|report| report.place != Place::Gpu && report.gpu_bytes == 0)
    );
    let lines = PlacesTable(&all).to_string();
    assert_eq!(lines.lines().count(), 1 + all.len(), "{lines}");
}
