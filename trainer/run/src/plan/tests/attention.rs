//! Kernels of attention: which ones a plan takes, and the time that it expects of them.

use super::*;
use crate::accelerator::without_torch;
use crate::computation::AttentionKernel;

#[test]
fn cudnns_attention_is_taken_where_it_can_be_used_and_the_reason_is_shown() {
    let fp32 = ("bf16.enabled", json!(false));
    let chunks = ("train.mlp_chunks", json!(2));
    let dropout = ("model.attention_dropout", json!(0.1));
    let heads = ("model.head_dim", json!(12));
    let wide = ("model.head_dim", json!(264));
    let torch = ("train.attention", json!("torch"));
    let old = Some("cuDNN 9 was not found: too old");
    for (changes, no_cudnn, kernel, why) in [
        (vec![], None, AttentionKernel::Cudnn, "the fastest"),
        (vec![], old, AttentionKernel::Torch, "too old"),
        (vec![fp32], None, AttentionKernel::Torch, "16-bit"),
        (
            vec![chunks],
            None,
            AttentionKernel::Torch,
            "explicit backward",
        ),
        (
            vec![dropout],
            None,
            AttentionKernel::Torch,
            "explicit backward",
        ),
        (vec![heads], None, AttentionKernel::Torch, "these have 12"),
        (vec![wide], None, AttentionKernel::Torch, "these have 264"),
        (vec![torch], None, AttentionKernel::Torch, ""),
    ] {
        let settings = large("none", "none", &changes);
        let hardware = known_h200(&settings, no_cudnn);
        let plan = Plan::new(&settings, hardware.clone()).unwrap();
        assert_eq!(plan.attention, kernel, "{changes:?}");
        let choice = plan.choices().iter().find(|c| c.key == "train.attention");
        let shown = choice.map_or(String::new(), |choice| choice.why.clone());
        assert!(shown.contains(why), "{changes:?}: {shown}");
        let lines = plan.overview(&settings).join("\n");
        let by = match kernel {
            AttentionKernel::Cudnn => "attention by cuDNN's kernels",
            AttentionKernel::Torch => "attention by torch's kernels",
        };
        assert!(
            lines.contains(by) && lines.contains(why.trim_start_matches("the fastest")),
            "{lines}"
        );

        // Asked for by name, it is refused with the same reason.
        let mut asked = changes.clone();
        asked.retain(|(key, _)| *key != "train.attention");
        asked.push(("train.attention", json!("cudnn")));
        let settings = large("none", "none", &asked);
        let plan = Plan::new(&settings, hardware).unwrap();
        let refused: Vec<String> = plan.problems().iter().map(ToString::to_string).collect();
        let refused = refused.join("\n");
        let is_refused = refused.contains("train.attention");
        let can =
            kernel == AttentionKernel::Cudnn || changes.iter().any(|c| c.0 == "train.attention");
        assert_eq!(is_refused, !can, "{asked:?}: {refused}");
        assert!(can || refused.contains(why), "{refused}");
    }
    // Of this GPU only the memory is known.
    let settings = large("none", "none", &[]);
    let plan = plan(&settings, &h200(1.0));
    assert_eq!(plan.attention, AttentionKernel::Torch);
}

#[test]
fn the_time_of_a_step_is_planned_with_attention() {
    // `trainer/bench/MEASUREMENTS.md`: one H200, state in GPU memory.
    for (seq_len, micro_batch, attention, deterministic, measured_s) in MEASURED {
        let settings = large(
            "none",
            "none",
            &[
                ("train.seq_len", json!(seq_len)),
                ("model.max_position_embeddings", json!(seq_len)),
                ("train.attention", json!(attention)),
                ("train.deterministic", json!(deterministic)),
            ],
        );
        let mut settings = settings;
        settings.batch.micro_batch = micro_batch;
        let plan = Plan::new(&settings, known_h200(&settings, None)).unwrap();
        let off = plan.bound.s / measured_s - 1.0;
        assert!(
            off.abs() < 0.1,
            "{seq_len} tokens, {attention}: {} s planned, {measured_s} s measured",
            plan.bound.s
        );
        let report = plan.report().bound;
        assert!((report.tflops * report.s * 1e12 / report.operations - 1.0).abs() < 1e-9);
        // The same rate, given, means the same time.
        let machine = Overrides {
            tflops: Some(plan.hardware.tflops.value),
            ..h200(1.0)
        };
        let again =
            Plan::new(&settings, Hardware::new(&settings, &machine, without_torch)).unwrap();
        assert!((again.bound.s / plan.bound.s - 1.0).abs() < 1e-9);
    }
}

/// Tokens of a sequence, sequences of a step, kernels, whether sums have a fixed order, seconds of a step.
const MEASURED: [(usize, usize, &str, bool, f64); 5] = [
    (2048, 8, "torch", true, 0.293),
    (2048, 8, "cudnn", true, 0.269),
    (32768, 1, "torch", true, 2.277),
    (32768, 1, "cudnn", true, 1.266),
    (131_072, 1, "cudnn", true, 14.42),
];

#[test]
fn a_sequence_of_a_million_tokens_fits_an_h200_with_its_inputs_in_host_memory() {
    let changes = [
        ("train.seq_len", json!(1 << 20)),
        ("train_micro_batch_size_per_gpu", json!(1)),
    ];
    let settings = large("cpu", "cpu", &changes);
    let plan = Plan::new(&settings, known_h200(&settings, None)).unwrap();
    let problems: Vec<String> = plan.problems().iter().map(ToString::to_string).collect();
    assert!(problems.is_empty(), "{problems:?}");
}

#[test]
fn a_gpu_that_is_named_is_planned_with_its_rates_and_kernels() {
    let settings = large("none", "none", &[]);
    let of = |name: Option<&str>| {
        let machine = Overrides {
            tflops: None,
            gpu_name: name.map(str::to_owned),
            ..h200(1.0)
        };
        let hardware = Hardware::new(&settings, &machine, without_torch);
        let plan = Plan::new(&settings, hardware).unwrap();
        (
            plan.attention,
            plan.bound.s,
            plan.overview(&settings).join("\n"),
        )
    };
    let (kernel, seconds, lines) = of(Some("H200"));
    let found = Plan::new(&settings, known_h200(&settings, None)).unwrap();
    assert_eq!((kernel, seconds), (AttentionKernel::Cudnn, found.bound.s));
    assert!(lines.contains("H200"), "{lines}");
    let (kernel, unknown_s, lines) = of(None);
    assert_eq!(kernel, AttentionKernel::Torch);
    assert!(unknown_s > 2.0 * seconds);
    assert!(lines.contains("--gpu names it"), "{lines}");
    assert!(known_gpus().all(|name| of(Some(name)).0 == AttentionKernel::Cudnn));
}
