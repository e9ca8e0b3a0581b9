//! Tests of what the plan chooses: places, fractions, staging, commits, activation checkpointing.

use super::*;
use crate::computation::ActivationCheckpointing;
use crate::config::ActivationsChoice;
use offload_support::units::ApproxBytes;

#[test]
fn all_state_on_drives_is_bound_by_their_writes() {
    let settings = large("nvme", "nvme", &[]);
    for (drives, least, most, staging) in [(1.0, 26.0, 31.0, 1.4e9), (4.0, 104.0, 126.0, 5e9)] {
        let plan = plan(&settings, &h200(drives));
        plan.check().unwrap();
        assert!((least..most).contains(&tflops(&plan)), "{}", tflops(&plan));
        assert_eq!(plan.bound.wall, swapper::Wall::Writes);
        assert_eq!(
            plan.bound.terms[0].what, "all writes",
            "staging does not limit the step"
        );
        let chosen = plan.memory.staging_bytes() as f64;
        assert!((0.8..1.1).contains(&(chosen / staging)), "{chosen}");
        assert_eq!(plan.swapper.commit_every, 1);
        assert_eq!(plan.optimizer_device, OptimizerDevice::Cpu);
        assert_eq!(plan.gpu_tiles, TileSums::default());
        let params = plan.params_count as f64;
        assert!((plan.step_bytes.written_bytes / params - 12.0).abs() < 0.1);
        assert!((plan.step_bytes.read_bytes() / params - 14.0).abs() < 0.1);
    }
}

#[test]
fn parameters_in_host_memory_are_committed_every_few_steps() {
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
    assert_eq!(host.optimizer_device, OptimizerDevice::Shared);
    assert_eq!(host.device_bytes(), 0);
    assert_eq!(host.step_bytes, StepBytes::default());
    // Weights, state and gradients, and nothing for computing.
    let tile_bytes = 14.0 * host.params_count as f64;
    assert!((host.host_bytes() as f64 / tile_bytes - 1.0).abs() < 0.03);
    let on_cpu = [("offload.optimizer_device", json!("cpu"))];
    let on_cpu = plan(&large("cpu", "cpu", &on_cpu), &h200(1.0));
    assert_eq!(on_cpu.optimizer_device, OptimizerDevice::Cpu);
    assert!(on_cpu.bound.s > host.bound.s);
    // Backward is 71 % of 137 T operations at 305 TFLOPS; 5.6 G parameters/s are updated.
    assert!(
        (on_cpu.bound.s - (0.321 + 0.24)).abs() < 0.01,
        "{}",
        on_cpu.bound.s
    );
    // Weights go up twice, gradients down once.
    assert_eq!(on_cpu.bus.up_bytes, 2 * on_cpu.bus.down_bytes);
    assert!(host.bus.up_bytes > on_cpu.bus.up_bytes);
}

#[test]
fn device_none_is_gpu_memory_where_there_is_a_gpu() {
    let settings = large("none", "none", &[]);
    let plan = plan(&settings, &h200(1.0));
    plan.check().unwrap();
    assert_eq!(plan.optimizer_device, OptimizerDevice::Gpu);
    assert!(plan.host_bytes() < GIB, "no tile is in host memory");
    assert!(plan.gpu_bytes() > 14 * plan.params_count);
    assert_eq!(plan.bus, BusBytes::default());
    assert!((tflops(&plan) - 305.0).abs() < 1.0);
    let without = Overrides {
        gpu_memory_bytes: Some(0),
        ..h200(1.0)
    };
    let plan = self::plan(&settings, &without);
    assert_eq!(
        (plan.gpu_bytes(), plan.optimizer_device),
        (0, OptimizerDevice::Cpu)
    );
    assert!(plan.host_bytes() > 14 * plan.params_count);
    // With only one device `none`, it means host memory, even with a GPU.
    let plan = self::plan(&large("none", "cpu", &[]), &h200(1.0));
    assert!(plan.host_bytes() > 13 * plan.params_count);
    assert_eq!(plan.gpu_tiles, TileSums::default());
}

#[test]
fn spare_gpu_memory_keeps_results_of_matrix_products() {
    let settings = large("cpu", "cpu", &[]);
    let keep = |gib: u64, settings: &RunSettings| {
        let machine = Overrides {
            gpu_memory_bytes: Some(gib * GIB),
            ..h200(1.0)
        };
        let plan = plan(settings, &machine);
        assert!(plan.check().is_err() || plan.gpu_bytes() <= gib * GIB);
        plan.checkpointing
    };
    assert_eq!(
        keep(139, &settings),
        ActivationCheckpointing::Matmuls.into()
    );
    // Some of the 24 blocks keep more than the others, and more of them with more memory.
    let some = [20, 16, 12, 6].map(|gib| keep(gib, &settings));
    let levels = some.map(|of| (of.level, of.more_blocks > 0));
    let (attention, full) = (
        ActivationCheckpointing::Attention,
        ActivationCheckpointing::Full,
    );
    assert_eq!(
        levels,
        [
            (attention, true),
            (attention, true),
            (full, true),
            (full, false)
        ]
    );
    assert!(some[0].more_blocks > some[1].more_blocks && some[0].more_blocks < 24);
    let given = large(
        "cpu",
        "cpu",
        &[("train.activation_checkpointing", json!("full"))],
    );
    assert_eq!(keep(139, &given), ActivationCheckpointing::Full.into());
    // 0.7 GB for each block at 16k tokens and a hidden size of 2048.
    let plan = plan(&settings, &h200(1.0));
    let block_bytes = plan.compute.kept_bytes as f64 / 24.0;
    assert!((0.6e9..0.8e9).contains(&block_bytes), "{block_bytes}");
    let too_much = large(
        "cpu",
        "cpu",
        &[("train.activation_checkpointing", json!("matmuls"))],
    );
    let small = Overrides {
        gpu_memory_bytes: Some(16 * GIB),
        ..h200(1.0)
    };
    assert!(refused(&too_much, &small).contains("set train.activation_checkpointing = \"auto\""));
}

#[test]
fn a_block_without_explicit_backward_keeps_nothing_and_the_plan_says_so() {
    let of = |model: Value, more: &[(&str, Value)]| {
        let mut settings = large("cpu", "cpu", more);
        settings.model = HfModel::from_json(&model.to_string()).unwrap().config;
        plan(&settings, &h200(1.0))
    };
    let mistral = |window: u64| {
        json!({"model_type": "mistral", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5504,
            "num_hidden_layers": 24, "num_attention_heads": 16, "sliding_window": window})
    };
    assert_eq!(
        of(mistral(1024), &[]).checkpointing,
        ActivationCheckpointing::Matmuls.into()
    );
    let gpt2 = json!({"model_type": "gpt2", "vocab_size": 32000, "n_embd": 2048, "n_layer": 24, "n_head": 16, "n_positions": 2048});
    for keep in ["auto", "matmuls"] {
        let plan = of(
            gpt2.clone(),
            &[("train.activation_checkpointing", json!(keep))],
        );
        assert_eq!(
            (plan.checkpointing, plan.compute.kept_bytes),
            (Checkpointing::default(), 0)
        );
        let chosen = plan
            .choices
            .iter()
            .find(|choice| choice.key == "train.activation_checkpointing");
        assert!(
            chosen
                .expect("the plan explains the choice")
                .why
                .contains("always recomputed")
        );
    }
}

#[test]
fn a_host_memory_budget_is_used_and_not_exceeded() {
    let mut before = 0;
    for gib in [6, 8, 12, 16, 24] {
        let budget = [("offload.host_memory_bytes", json!(format!("{gib}GiB")))];
        let plan = plan(&large("nvme", "nvme", &budget), &h200(4.0));
        plan.check().unwrap();
        let host_bytes = plan.host_bytes();
        assert!(host_bytes <= gib * GIB, "{host_bytes} of {gib} GiB");
        assert!(host_bytes > before);
        before = host_bytes;
        let (param, state) = (plan.swapper.param_fraction, plan.swapper.state_fraction);
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
fn staging_fits_in_the_rest_of_host_memory() {
    let machine = Overrides {
        host_memory_bytes: Some(4 * GIB),
        ..h200(4.0)
    };
    let plan = plan(&large("nvme", "nvme", &[]), &machine);
    plan.check().unwrap();
    assert!(plan.memory.staging_bytes() < 2 * GIB);
    assert_eq!(plan.bound.terms[0].what, "backward + writes beyond staging");
    assert!(
        plan.to_string()
            .contains("the step would be shorter with more")
    );
}

#[test]
fn as_many_gradients_as_fit_stay_in_host_memory() {
    let params = 1.345e9;
    let mut before = 0.0;
    for gib in [1, 2, 3, 8] {
        let budget = [("offload.host_memory_bytes", json!(format!("{gib}GiB")))];
        let settings = large("nvme", "nvme", &budget);
        let plan = plan(&settings, &h200(4.0));
        plan.check().unwrap();
        assert!(plan.host_bytes() <= gib * GIB);
        let fraction = plan.swapper.grad_fraction;
        assert!(
            fraction > before || fraction == 1.0,
            "{fraction} of {gib} GiB"
        );
        assert_eq!(fraction == 1.0, gib >= 3, "{gib} GiB");
        before = fraction;
        // Each gradient on devices costs two bytes read and two written, and space for one copy.
        let gone = (1.0 - fraction) * params;
        let bytes = &plan.step_bytes;
        assert!((bytes.grad_written_bytes - 2.0 * gone).abs() < 0.01 * params);
        assert_eq!(plan.memory.scratch_bytes as f64, bytes.grad_written_bytes);
        if fraction < 1.0 {
            let written = bytes.written_bytes - bytes.grad_written_bytes;
            assert!(
                (written / params - 12.0).abs() < 0.1,
                "nothing else is resident"
            );
        }
        let chosen = plan.choices().iter().find(|c| c.key == "offload.gradients");
        assert_eq!(chosen.is_some(), fraction < 1.0);
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
fn block_inputs_move_to_host_memory_if_gpu_memory_is_too_small() {
    let plan_of = |bytes: u64, changes: &[(&str, Value)]| {
        let machine = Overrides {
            gpu_memory_bytes: Some(bytes),
            ..h200(1.0)
        };
        plan(&large("cpu", "cpu", changes), &machine)
    };
    let given = |place: &str| {
        let least = ("train.activation_checkpointing", json!("full"));
        plan_of(141 * GIB, &[least, ("offload.activations", json!(place))])
    };
    let (here, there) = (given("gpu"), given("cpu"));
    // 24 blocks of 16k tokens of 2048 numbers leave the GPU, are in host memory instead, and cross the bus
    // twice.
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

    // Too small for all of them, including the tenth that choices leave unused.
    let small = (here.gpu_bytes() + there.gpu_bytes()) / 2 * 10 / 9;
    let chosen = |plan: &Plan| {
        plan.choices()
            .iter()
            .any(|c| c.key == "offload.activations")
    };
    let (large_gpu, small_gpu) = (plan_of(141 * GIB, &[]), plan_of(small, &[]));
    small_gpu.check().unwrap();
    assert!(small_gpu.inputs_in == InputsIn::Host && chosen(&small_gpu));
    assert!(large_gpu.inputs_in == InputsIn::Place && !chosen(&large_gpu));
    assert!(
        small_gpu.to_string().contains("block inputs 1.5 GiB"),
        "{small_gpu}"
    );
    // If the settings keep them on a GPU that is too small, the run is refused.
    let machine = Overrides {
        gpu_memory_bytes: Some(there.gpu_bytes()),
        ..h200(1.0)
    };
    let stay = large("cpu", "cpu", &[("offload.activations", json!("gpu"))]);
    let text = refused(&stay, &machine);
    assert!(text.contains("of GPU memory"), "{text}");
}

/// Settings of a run on drives that recomputes everything, so that only the place of block inputs differs.
fn with_inputs(changes: &[(&'static str, Value)]) -> RunSettings {
    let least = ("train.activation_checkpointing", json!("full"));
    let staging = ("offload.staging_bytes", json!("1GiB"));
    let fraction = ("offload.resident_fraction", json!(0.0));
    large(
        "nvme",
        "nvme",
        &[&[least, staging, fraction], changes].concat(),
    )
}

#[test]
fn block_inputs_on_drives_take_space_and_bytes_of_a_step_and_no_memory() {
    let of = |place: &str| {
        let settings = with_inputs(&[("offload.activations", json!(place))]);
        (plan(&settings, &h200(4.0)), settings)
    };
    let ((host, _), (drives, settings)) = (of("cpu"), of("nvme"));
    let batch = &settings.batch;
    let input_bytes = (batch.micro_batch * batch.seq_len * 2048 * 2) as u64;
    assert_eq!(drives.input_bytes, input_bytes);
    // 24 blocks' inputs of a group leave host memory, pass through slots, and have tiles on the drives.
    let area = drives.swapper.scratch;
    let whole = input_bytes.next_multiple_of(area.tile_bytes.into());
    assert_eq!(
        (host.compute.away_bytes, drives.compute.on_drives_bytes),
        (24 * input_bytes, 24 * input_bytes)
    );
    assert!(
        (24 * whole..25 * input_bytes).contains(&area.bytes()),
        "{area:?}"
    );
    assert_eq!(
        host.host_bytes() - drives.host_bytes(),
        24 * input_bytes - drives.memory.scratch_slot_bytes()
    );
    assert!(drives.memory.scratch_slot_bytes() > 0);
    assert_eq!(drives.gpu_bytes(), host.gpu_bytes());
    assert_eq!(drives.device_bytes() - host.device_bytes(), area.bytes());
    assert_eq!(drives.device_input_bytes(), area.bytes());
    // Each micro-batch's cross the bus as before, and are written once and read once.
    assert_eq!(drives.bus, host.bus);
    let moved = (24 * whole * batch.micro_batches as u64) as f64;
    let bytes = &drives.node_bytes;
    assert_eq!(
        (bytes.scratch_written_bytes, bytes.scratch_read_bytes),
        (moved, moved)
    );
    let outlook = |plan: &Plan| plan.outlook().run_written_bytes;
    assert_eq!(
        outlook(&drives) - outlook(&host),
        moved * drives.steps as f64
    );
    let report = drives.report();
    assert_eq!(report.chosen.activations, "nvme");
    assert_eq!(report.step.input_written_bytes as f64, moved);
    assert_eq!(report.device_input_bytes, area.bytes());
    let said = drives.to_string();
    for part in [
        format!(", {} of it for block inputs", ApproxBytes(area.bytes())),
        format!(", block inputs {}), writes ", ApproxBytes(moved as u64)),
        format!(" (block inputs {})", ApproxBytes(moved as u64)),
        format!(
            "\ninputs    of blocks on drives, {}; a step writes ",
            ApproxBytes(area.bytes())
        ),
        format!(
            ", block inputs in transit {}",
            ApproxBytes(drives.memory.scratch_slot_bytes())
        ),
    ] {
        assert!(said.contains(&part), "{part}: {said}");
    }
    assert!(
        !host.to_string().contains("of it for block inputs"),
        "{host}"
    );
}

#[test]
fn block_inputs_move_to_drives_if_they_fit_nowhere_else_in_a_run_that_has_some() {
    let given = |place: &str| {
        let settings = with_inputs(&[("offload.activations", json!(place))]);
        plan(&settings, &h200(4.0))
    };
    let host = given("cpu");
    let small_gpu = Overrides {
        gpu_memory_bytes: Some(host.gpu_bytes() * 10 / 9 + (1 << 20)),
        ..h200(4.0)
    };
    let chosen = |settings: &RunSettings| {
        let plan = plan(settings, &small_gpu);
        let mut keys = plan.choices().iter().map(|choice| choice.key);
        (plan.inputs_in, keys.any(|key| key == "offload.activations"))
    };
    let with_budget = |bytes: u64| with_inputs(&[("offload.host_memory_bytes", json!(bytes))]);
    let enough = host.host_bytes() * 10 / 9 + (64 << 20);
    assert_eq!(chosen(&with_budget(enough)), (InputsIn::Host, true));
    let too_little = host.compute.away_bytes;
    assert_eq!(chosen(&with_budget(too_little)), (InputsIn::Drives, true));
    let budget = ("offload.host_memory_bytes", json!(too_little));
    let no_drives = large("cpu", "cpu", &[budget]);
    assert_eq!(chosen(&no_drives), (InputsIn::Host, true));

    // A processor's own memory is host memory.
    let on_processor = |bytes: u64| {
        let device = ("train.device", json!("cpu"));
        let budget = ("offload.host_memory_bytes", json!(bytes));
        plan(&with_inputs(&[device, budget]), &Overrides::default())
    };
    let here = on_processor(1 << 50);
    assert_eq!(here.inputs_in, InputsIn::Place);
    let there = on_processor(here.compute.activation_bytes);
    assert_eq!(there.inputs_in, InputsIn::Drives);
    assert!(there.host_bytes() < here.host_bytes());

    // A drive that is too small is refused with what inputs take of it.
    let dir = tempfile::tempdir().unwrap();
    let mut settings = with_inputs(&[("offload.activations", json!("nvme"))]);
    settings.batch.seq_len = 1 << 23;
    settings.placement.nvme_paths = vec![dir.path().to_owned()];
    let large = plan(&settings, &h200(4.0));
    let mut problems = large.problems().iter();
    let problem = problems.find(|problem| problem.kind == ProblemKind::DeviceSpace);
    let said = problem.expect("no drive is so large").to_string();
    let bytes = ApproxBytes(large.device_input_bytes());
    let part = format!("(block inputs take {bytes} on drives: offload.activations)");
    assert!(said.contains(&part), "{said}");
    // An area has a largest size, and the plan does not choose a larger one by itself.
    settings.batch.seq_len = 1 << 27;
    let hardware = Hardware::new(&settings, &h200(4.0), without_torch);
    let said = Plan::new(&settings, hardware).err().unwrap().to_string();
    assert!(said.contains("offload.activations is \"nvme\""), "{said}");
    settings.offload.activations = ActivationsChoice::Auto;
    assert_eq!(plan(&settings, &h200(4.0)).inputs_in, InputsIn::Host);
}

#[test]
fn block_inputs_stay_off_drives_if_a_smaller_group_or_no_copy_fits_without_them() {
    let settings = |changes: &[(&str, Value)]| {
        let always = [
            ("model.num_key_value_heads", json!(1)),
            ("train.activation_checkpointing", json!("full")),
            ("bf16.enabled", json!(false)),
        ];
        let mut settings = large("nvme", "nvme", &[&always[..], changes].concat());
        settings.batch.micro_batch = 4;
        settings.batch.micro_batches = 16;
        settings
    };
    let machine = |host_gib: u64| Overrides {
        host_memory_bytes: Some(host_gib * GIB),
        gpu_memory_bytes: Some(24 * GIB),
        tflops: None,
        ..h200(8.0)
    };
    let together = ("train.micro_batch_group", json!(16));
    let all = plan(&settings(std::slice::from_ref(&together)), &machine(16));
    assert_eq!(
        all.inputs_in,
        InputsIn::Drives,
        "alone, they fit nowhere else"
    );
    let grouped = plan(&settings(&[]), &machine(16));
    assert!(grouped.micro_batch_group < 16, "{grouped}");
    assert_ne!(grouped.inputs_in, InputsIn::Drives);

    let on_two_nodes = |shard: &str| {
        let changes = [
            together.clone(),
            ("train.ranks", json!(2)),
            ("offload.shard", json!(shard)),
        ];
        let mut settings = settings(&changes);
        settings.local_ranks = 1;
        plan(&settings, &machine(29))
    };
    for shard in ["all", "auto"] {
        let plan = on_two_nodes(shard);
        assert_eq!(
            (plan.copy_bytes, plan.inputs_in),
            (0, InputsIn::Host),
            "{shard}: {plan}"
        );
    }
}

#[test]
fn block_inputs_go_to_drives_only_in_a_store_that_was_made_with_room_for_them() {
    let host = plan(
        &with_inputs(&[("offload.activations", json!("cpu"))]),
        &h200(4.0),
    );
    let budget = ("offload.host_memory_bytes", json!(host.compute.away_bytes));
    let on_small = |settings: &RunSettings, store_file_bytes: Option<u64>| {
        let machine = Overrides {
            gpu_memory_bytes: Some(host.gpu_bytes() * 10 / 9 + (1 << 20)),
            ..h200(4.0)
        };
        let mut hardware = Hardware::new(settings, &machine, without_torch);
        hardware.store_file_bytes = store_file_bytes;
        Plan::new(settings, hardware).unwrap()
    };
    let auto = with_inputs(std::slice::from_ref(&budget));
    let new = on_small(&auto, None);
    let needed = new.device_file_bytes(1);
    let chosen = |bytes: u64| on_small(&auto, Some(bytes)).inputs_in;
    assert_eq!(
        (new.inputs_in, chosen(needed), chosen(needed - 1)),
        (InputsIn::Drives, InputsIn::Drives, InputsIn::Host)
    );
    let given = with_inputs(&[budget, ("offload.activations", json!("nvme"))]);
    let said = |bytes: u64| {
        let problems = on_small(&given, Some(bytes)).problems;
        let of_space = problems
            .iter()
            .find(|found| found.kind == ProblemKind::DeviceSpace);
        of_space.map(ToString::to_string)
    };
    assert_eq!(said(needed), None);
    let said = said(needed - 1).expect("it is refused");
    for part in ["made without room", "\"cpu\" or \"gpu\"", "--to-checkpoint"] {
        assert!(said.contains(part), "{said}");
    }
}

#[test]
fn the_reason_for_the_place_of_the_update_says_with_what_it_was_compared() {
    let why = |gpu_gib: Option<u64>, tflops: f64| {
        let machine = Overrides {
            gpu_memory_bytes: Some(gpu_gib.unwrap_or(0) * GIB),
            tflops: Some(tflops),
            ..h200(4.0)
        };
        let plan = plan(&large("cpu", "cpu", &[]), &machine);
        let mut choices = plan.choices().iter();
        let choice = choices.find(|choice| choice.key == "offload.optimizer_device");
        let choice = choice.expect("a choice").clone();
        (choice.value, choice.why)
    };
    for (gpu_gib, tflops, value, part) in [
        (None, 305.0, "cpu", "there is no GPU"),
        (
            Some(139),
            1.0,
            "cpu",
            "a step would take as long with the GPU updating",
        ),
        (
            Some(139),
            3000.0,
            "shared",
            "a step is shorter than with the CPU or the GPU updating alone",
        ),
    ] {
        let (found, why) = why(gpu_gib, tflops);
        assert_eq!(found, value, "{why}");
        assert!(why.contains(part), "{why}");
    }
}
