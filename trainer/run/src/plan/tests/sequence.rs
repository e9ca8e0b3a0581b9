//! Ranks that divide each sequence among themselves: what each has of a step, and what they exchange.

use super::*;
use crate::computation::ActivationCheckpointing;

/// A run of 4 ranks with long sequences, of which `sequence_ranks` divide each.
fn divided(sequence_ranks: u64, changes: &[(&str, Value)]) -> RunSettings {
    let mut all = vec![
        ("train.ranks", json!(4)),
        ("train.seq_len", json!(32768)),
        ("train.sequence_parallel", json!(sequence_ranks)),
        ("model.max_position_embeddings", json!(32768)),
        ("model.num_key_value_heads", json!(2)),
    ];
    all.extend_from_slice(changes);
    let mut settings = large("none", "none", &all);
    settings.batch.micro_batch = 2;
    settings
}

/// Bytes of a tensor of `heads` heads for all of a rank's tokens of a step, in bf16.
fn tensor_bytes(settings: &RunSettings, heads: u64) -> u64 {
    let tokens = 2 * 32768 / u64::from(settings.batch.sequence_ranks);
    tokens * heads * 128 * 2
}

#[test]
fn each_rank_has_its_part_of_the_tokens_operations_and_activations() {
    let keep = [("train.activation_checkpointing", json!("attention"))];
    let whole = plan(&divided(1, &keep), &h200(1.0));
    for ranks in [2, 4] {
        let settings = divided(ranks, &keep);
        let plan = plan(&settings, &h200(1.0));
        let part = |whole: u64| whole / ranks;
        assert_eq!(settings.step_samples(), 2 * 4 / ranks);
        assert_eq!(plan.tokens, part(whole.tokens));
        assert_eq!(
            plan.operations.products,
            whole.operations.products / ranks as f64
        );
        assert_eq!(
            plan.operations.attention,
            whole.operations.attention / ranks as f64
        );
        let (of_plan, of_whole) = (plan.compute, whole.compute);
        assert_eq!(of_plan.activation_bytes, part(of_whole.activation_bytes));
        assert_eq!(
            plan.memory, whole.memory,
            "state is divided among all ranks"
        );
        // The output of attention is kept twice, and of 2 key heads 4 ranks have 4.
        let more = tensor_bytes(&settings, 16)
            + if ranks == 4 {
                tensor_bytes(&settings, 4)
            } else {
                0
            };
        let kept = part(of_whole.kept_bytes) + 24 * more;
        assert_eq!(of_plan.kept_bytes, kept, "{ranks} ranks");
        assert!(of_plan.working_bytes < of_whole.working_bytes);
        // NCCL's memory for another group.
        assert_eq!(of_plan.context_bytes, of_whole.context_bytes + (1 << 30));
    }
}

#[test]
fn what_ranks_exchange_is_counted_and_takes_time() {
    let with = |ranks, keep: ActivationCheckpointing| {
        let keep = serde_json::to_value(keep).unwrap();
        let settings = divided(ranks, &[("train.activation_checkpointing", keep)]);
        let plan = plan(&settings, &h200(1.0));
        (settings, plan)
    };
    assert_eq!(
        with(1, ActivationCheckpointing::Full).1.exchange,
        SequenceExchange::default()
    );
    // Heads of query, key, value and output together: 16 + 2 + 2 + 16; with 4 ranks each has a key head.
    for (ranks, heads) in [(2, 36), (4, 40)] {
        for (keep, passes) in [
            (ActivationCheckpointing::Full, 3),
            (ActivationCheckpointing::Attention, 2),
            (ActivationCheckpointing::Matmuls, 2),
        ] {
            let (settings, plan) = with(ranks, keep);
            let once = 24 * tensor_bytes(&settings, heads) * (ranks - 1) / ranks;
            assert_eq!(plan.exchange.forward_bytes, once, "{ranks}, {keep:?}");
            assert_eq!(
                plan.exchange.sum_bytes(),
                passes * once,
                "{ranks}, {keep:?}"
            );
            let s = plan.exchange_s(plan.exchange.sum_bytes());
            assert_eq!(s, (passes * once) as f64 / 50e9);
            let lines = plan.overview(&settings).join("\n");
            let says = format!(
                "sequence  on {ranks} ranks, {} of 32768 tokens on each",
                32768 / ranks
            );
            assert!(lines.contains(&says), "{lines}");
            let report = plan.report();
            assert_eq!(report.sequence_parallel, ranks as u32);
            assert_eq!(report.step.sequence_exchange_process, plan.exchange);
            assert_eq!(report.bound.sequence_exchange_s, s);
        }
    }
    // Without a given rate, the step is longer by the exchange, and the rate of all operations lower.
    let unknown = Overrides {
        tflops: None,
        ..h200(1.0)
    };
    let settings = divided(2, &[]);
    let mut hardware = Hardware::new(&settings, &unknown, without_torch);
    let plan = Plan::new(&settings, hardware.clone()).unwrap();
    hardware.gpu.as_mut().unwrap().bus_bytes_per_s.value = f64::INFINITY;
    let at_once = Plan::new(&settings, hardware).unwrap();
    let longer = plan.compute_s() - at_once.compute_s();
    let s = plan.exchange_s(plan.exchange.sum_bytes());
    assert!((longer / s - 1.0).abs() < 1e-9, "{longer}, {s}");
}

#[test]
fn ranks_whose_gpus_have_too_little_memory_are_told_to_divide_sequences() {
    let tiny = Overrides {
        gpu_memory_bytes: Some(1 << 20),
        ..h200(1.0)
    };
    for (ranks, sequence_ranks, told) in [(1, 1, false), (4, 2, true), (4, 4, false)] {
        let changes = [
            ("train.ranks", json!(ranks)),
            ("train.sequence_parallel", json!(sequence_ranks)),
        ];
        let text = refused(&large("cpu", "cpu", &changes), &tiny);
        let says = text.contains("A higher train.sequence_parallel");
        assert_eq!(says, told, "{ranks}, {sequence_ranks}: {text}");
    }
}

#[test]
fn a_sequence_on_several_nodes_is_exchanged_over_their_network() {
    for (sequence_ranks, local_ranks, elsewhere) in [(2, 2, 0.0), (4, 2, 2.0 / 3.0), (2, 1, 1.0)] {
        let mut settings = divided(sequence_ranks, &[]);
        settings.local_ranks = local_ranks;
        let divided_plan = plan(&settings, &h200(1.0));
        settings.batch.sequence_ranks = 1;
        let whole = plan(&settings, &h200(1.0));
        let more = divided_plan.network_bytes - whole.network_bytes;
        let bytes = divided_plan.exchange.sum_bytes();
        let expected = bytes as f64 * elsewhere * f64::from(local_ranks);
        assert_eq!(more, expected as u64);
        let s = divided_plan.exchange_s(bytes);
        let network_s = expected / 25e9;
        assert!(s >= network_s * 0.999 && s > 0.0, "{s}, {network_s}");
    }
}
