//! Tests of what the plan counts: bytes of each tier by stage and ranks, time, wear, and the JSON report.

use super::*;
use crate::accelerator::without_torch;
use offload_support::units::ApproxBytes;

#[test]
fn attention_weights_are_counted_with_attention_dropout() {
    let mut settings = large("cpu", "cpu", &[]);
    let before = plan(&settings, &h200(1.0)).compute.working_bytes;
    settings.dropout.attention = 0.1;
    let after = plan(&settings, &h200(1.0)).compute.working_bytes;
    // 8 sequences, 16 heads, 2048 x 2048, fp32, some copies.
    let weights_bytes = 8 * 16 * 2048 * 2048 * 4;
    assert!(after > before + 4 * weights_bytes, "{before}, {after}");
}

#[test]
fn figures_that_were_not_measured_are_called_assumed() {
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
    assert_eq!(plan.hardware.tflops.source, FigureSource::Assumed);
    assert!(plan.memory.staging_bytes() as f64 > 0.97 * STAGING_BYTES_ASSUMED as f64);
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
    // The same bytes on the same drives, with four times the tokens.
    assert!((tflops(&four) / tflops(&one) - 4.0).abs() < 0.1);
}

#[test]
fn the_report_has_its_documented_names() {
    let report =
        serde_json::to_value(plan(&large("nvme", "nvme", &[]), &h200(1.0)).report()).unwrap();
    for (path, is) in [
        ("/version", json!(1)),
        ("/fits", json!(true)),
        ("/problems", json!([])),
        ("/tokens_per_step", json!(16384)),
        ("/gradient_accumulation_steps", json!(1)),
        ("/chosen/commit_every", json!(1)),
        ("/chosen/optimizer_step", json!("deferred")),
        ("/chosen/optimizer_device", json!("cpu")),
        ("/chosen/param_resident_fraction", json!(0.0)),
        ("/bound/wall", json!("device writes")),
        ("/bound/terms/0/what", json!("all writes")),
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
fn moments_in_fewer_bits_masters_in_bf16_lion_and_muon_take_fewer_bytes_a_parameter() {
    let machine = h200(0.0);
    let of = |kind: &str, moments: &str, master: &str| {
        let changes = [
            ("optimizer.type", json!(kind)),
            ("optimizer.moments", json!(moments)),
            ("optimizer.master", json!(master)),
        ];
        let plan = plan(&large("nvme", "nvme", &changes), &machine);
        let step = plan.step_bytes;
        let moved = step.read_bytes() + step.written_bytes;
        (
            plan.memory.table_bytes,
            step.written_bytes as u64,
            moved as u64,
        )
    };
    let all = 1_345_000_000.0;
    let about = |bytes: u64, of: f64| (bytes as f64 - of).abs() < of / 20.0;
    // Stored and written once; parameters are read twice, states once.
    for (kind, moments, master, bytes_each, moved_each) in [
        ("AdamW", "fp32", "fp32", 12.0, 26.0),
        ("AdamW", "bf16", "fp32", 8.0, 18.0),
        ("AdamW", "8bit", "fp32", 6.0, 14.0),
        ("Lion", "fp32", "fp32", 8.0, 18.0),
        // Embedding and head are a tenth of this model, with the 12 and 26 bytes of AdamW.
        ("Muon", "fp32", "fp32", 8.4, 20.6),
        ("Lion", "bf16", "fp32", 6.0, 14.0),
        ("AdamW", "fp32", "bf16", 10.0, 22.0),
        ("AdamW", "bf16", "bf16", 6.0, 14.0),
        ("Lion", "bf16", "bf16", 4.0, 10.0),
    ] {
        let (stored, written, moved) = of(kind, moments, master);
        assert!(
            about(stored, bytes_each * all)
                && about(written, bytes_each * all)
                && about(moved, moved_each * all),
            "{kind}, {moments}, {master}: {stored} stored, {written} written, {moved} moved"
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
    // 2 bytes for each parameter, padded or not.
    let all = 2 * 1_345_000_000u64;
    let about = |bytes: u64, of: u64| bytes.abs_diff(of) < of / 20;
    // Tiles: all of them, or a quarter. State has 10 bytes for each parameter, parameters have 2.
    assert!(about(zero.0.param_bytes, all) && about(zero.0.state_bytes, 5 * all));
    for (tiles, _) in [one, two, three] {
        assert!(about(tiles.param_bytes, all / 4) && about(tiles.state_bytes, 5 * all / 4));
    }
    // Weights: whole, or those of some units.
    for (_, compute) in [zero, one, two] {
        assert!(about(compute.unit_buffer_bytes, all), "{compute:?}");
    }
    assert!(three.1.unit_buffer_bytes < all / 4);
    // Gradients in transit: whole, or those of some units.
    for (_, compute) in [zero, one] {
        assert!(about(compute.grad_buffer_bytes, all), "{compute:?}");
    }
    for (_, compute) in [two, three] {
        assert!(compute.grad_buffer_bytes < all / 4, "{compute:?}");
    }
    // With several micro-batches, sums are kept in fp32 until the end.
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
            ("offload.optimizer_device", json!("cpu")),
        ];
        plan(&large("none", "cpu", &changes), &h200(0.0))
            .bus
            .up_bytes
    };
    assert_eq!((up(1), up(2)), (up(2), up(3) / 2));
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
    // Drives that write all day: 12.8 GB/s.
    assert!((outlook.written_bytes_per_day / (12.8e9 * 86400.0) - 1.0).abs() < 1e-3);
    // 600 TB and 3.2 GB/s for each drive.
    let rating_s = outlook.rating_s.unwrap();
    assert!(
        (rating_s / (600e12 / 3.2e9) - 1.0).abs() < 1e-3,
        "{rating_s}"
    );
    let text = plan.to_string();
    assert!(
        text.contains("wear      at most 1106 TB written in a day"),
        "{text}"
    );
    assert!(
        text.contains("over 4 drives; their rated endurance lasts 2.17 days"),
        "{text}"
    );
    let in_host = self::plan(&large("cpu", "cpu", &[]), &machine);
    assert_eq!(in_host.outlook().rating_s, None);
    assert!(!in_host.to_string().contains("wear"));
}

#[test]
fn each_place_is_planned_as_a_run_with_its_state_there() {
    let settings = large("none", "none", &[]);
    let hardware = Hardware::new(&settings, &h200(1.0), without_torch);
    let all = compare_places(&settings, &hardware);
    // What fits whole is not divided.
    let wanted = Place::ALL.into_iter();
    let wanted: Vec<Place> = wanted.filter(|place| *place != Place::HostAndGpu).collect();
    assert_eq!(
        all.iter().map(|report| report.place).collect::<Vec<_>>(),
        wanted
    );
    for (report, tiers) in all.iter().zip([
        ("none", "none"),
        ("cpu", "cpu"),
        ("cpu", "nvme"),
        ("nvme", "nvme"),
        ("nvme", "nvme"),
        ("nvme", "nvme"),
    ]) {
        let mut settings = large(tiers.0, tiers.1, &[]);
        if [Place::DrivesHostAndGpu, Place::DrivesAndHost].contains(&report.place) {
            settings.placement.resident_fraction = crate::config::ResidentFraction::Auto;
        }
        if report.place == Place::DrivesHostAndGpu {
            settings.placement.gpu_resident_fraction = crate::config::ResidentFraction::Auto;
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
    // What is in GPU memory shortens the update that a step waits for.
    let [_, _, _, with_gpu, in_host, _] = &all[..] else {
        panic!("six places");
    };
    assert!(with_gpu.step_s < in_host.step_s, "{}", PlacesTable(&all));
    let without = Overrides {
        gpu_memory_bytes: Some(0),
        ..h200(1.0)
    };
    let all = compare_places(
        &settings,
        &Hardware::new(&settings, &without, without_torch),
    );
    assert!(
        all.iter()
            .all(|report| report.place != Place::Gpu && report.gpu_bytes == 0)
    );
    let lines = PlacesTable(&all).to_string();
    assert_eq!(lines.lines().count(), 1 + all.len(), "{lines}");
}

#[test]
fn each_of_several_directories_is_said_to_take_a_file() {
    let place = json!({"device": "nvme", "nvme_path": ["/nvme0", "/nvme1"]});
    let two = large(
        "nvme",
        "nvme",
        &[
            ("zero_optimization.offload_param", place.clone()),
            ("zero_optimization.offload_optimizer", place),
        ],
    );
    let plan = plan(&two, &h200(1.0));
    let file_bytes = plan.device_file_bytes(2);
    assert!(2 * file_bytes > plan.device_bytes() + plan.device_bytes() / 8);
    let text = plan.overview(&two).remove(0);
    let files = format!(
        "in /nvme0, /nvme1, a file of {} in each",
        ApproxBytes(file_bytes)
    );
    assert!(text.contains(&files), "{text}");
}

#[test]
fn host_memory_of_a_node_is_that_of_its_ranks_where_they_differ() {
    let muon = ("optimizer", json!({"type": "Muon", "params": {}}));
    for (device, ranks) in [("cpu", 2), ("cpu", 8), ("nvme", 3), ("nvme", 8)] {
        // The first rank has the most tiles, and with Muon the larger states of norms.
        let changes = [
            muon.clone(),
            ("train.ranks", json!(ranks)),
            ("offload.tile_elems", json!(1 << 20)),
        ];
        let plan = plan(&large(device, device, &changes), &h200(1.0));
        let of_rank = |rank| {
            let swapper = SwapperSettings {
                rank,
                ..plan.swapper.clone()
            };
            swapper.plan().unwrap().host_bytes()
        };
        let all: u64 = (0..ranks).map(of_rank).sum();
        let ranks = u64::from(ranks);
        let beside = ranks * (plan.host_bytes() - of_rank(0));
        assert_eq!(plan.node_host_bytes(), all + beside, "{device}, {ranks}");
        assert_eq!(plan.report().host.node_bytes, all + beside);
        let line = format!(
            "; all {ranks} processes of the node {}\n",
            ApproxBytes(all + beside)
        );
        assert!(plan.to_string().contains(&line), "{plan}");
    }
    // A budget that holds the ranks as they are is enough.
    let with = |budget: Option<u64>| {
        let mut changes = vec![
            muon.clone(),
            ("train.ranks", json!(8)),
            ("offload.tile_elems", json!(1 << 20)),
        ];
        changes.extend(budget.map(|bytes| ("offload.host_memory_bytes", json!(bytes))));
        plan(&large("cpu", "cpu", &changes), &h200(1.0))
    };
    let all = with(None);
    assert!(all.node_host_bytes() + GIB < 8 * all.host_bytes());
    with(Some(all.node_host_bytes())).check().unwrap();
    with(Some(all.node_host_bytes() - 1)).check().unwrap_err();
}

#[test]
fn a_checkpoint_is_written_at_the_rate_of_one_of_the_drives_that_are_given() {
    let settings = large("cpu", "cpu", &[]);
    let machine = Overrides {
        drives_count: Some(4),
        ..h200(4.0)
    };
    let text = plan(&settings, &machine).to_string();
    assert!(
        text.contains(" to write one at 3.20 GB/s (given)"),
        "{text}"
    );
}
