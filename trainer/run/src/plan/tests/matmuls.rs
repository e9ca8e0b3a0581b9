//! Products in 8 bits: what a plan refuses, and what it promises.

use super::*;
use kernels::fp8::fp8_refusal;
use kernels::gpu::Vendor;

#[test]
fn products_in_8_bits_are_refused_by_name_where_they_cannot_be_computed() {
    let fp8 = ("train.matmuls", json!("fp8"));
    let old = fp8_refusal(Vendor::Cuda, "sm_86");
    let narrow = vec![
        ("model.head_dim", json!(72)),
        ("model.num_key_value_heads", json!(1)),
    ];
    for (mut changes, no_fp8, why) in [
        (vec![], None, ""),
        (vec![], old, "this GPU (sm_86) has no matrix units for them"),
        (vec![], fp8_refusal(Vendor::Hip, "gfx942"), "only NVIDIA's"),
        (vec![("bf16.enabled", json!(false))], None, "\"bf16\""),
        (
            vec![("train.mlp_chunks", json!(2))],
            None,
            "explicit backward",
        ),
        (
            vec![("model.attention_dropout", json!(0.1))],
            None,
            "dropout",
        ),
        (
            vec![("model.intermediate_size", json!(5500))],
            None,
            "model.intermediate_size is 5500",
        ),
        (narrow, None, "key heads is 72"),
        (
            vec![("train.seq_len", json!(2047))],
            None,
            "number of tokens is",
        ),
    ] {
        changes.push(fp8.clone());
        let settings = large("none", "none", &changes);
        let mut hardware = known_h200(&settings, None);
        hardware.gpu.as_mut().unwrap().no_fp8 = no_fp8;
        let plan = Plan::new(&settings, hardware).unwrap();
        let refused: Vec<String> = plan.problems().iter().map(ToString::to_string).collect();
        let refused = refused.join("\n");
        assert_eq!(
            refused.contains("train.matmuls"),
            !why.is_empty(),
            "{changes:?}: {refused}"
        );
        assert!(refused.contains(why), "{changes:?}: {refused}");
    }
    let settings = large("none", "none", &[fp8, ("train.device", json!("cpu"))]);
    let hardware = Hardware::new(&settings, &Overrides::default(), without_torch);
    let plan = Plan::new(&settings, hardware).unwrap();
    assert!(
        plan.problems()
            .iter()
            .any(|problem| problem.to_string().contains("there is no GPU"))
    );
}

#[test]
fn the_plan_says_what_products_in_8_bits_give_and_take() {
    let planned = |matmuls: &str| {
        let settings = large("none", "none", &[("train.matmuls", json!(matmuls))]);
        let plan = Plan::new(&settings, known_h200(&settings, None)).unwrap();
        let lines = plan.overview(&settings).join("\n");
        assert_eq!(plan.to_string().contains("in 8 bits"), matmuls == "fp8");
        (plan.bound.s, plan.gpu_bytes(), lines)
    };
    let (own, eight) = (planned("dtype"), planned("fp8"));
    assert!(eight.0 < 0.9 * own.0, "{} and {}", eight.0, own.0);
    assert!(eight.1 > own.1, "both layouts of the factors take memory");
    assert!(
        eight.2.contains("products of blocks in 8 bits"),
        "{}",
        eight.2
    );
    assert!(!own.2.contains("8 bits"), "{}", own.2);
    assert!(eight.2.contains(" % less time"), "{}", eight.2);
    // In small matrices, the conversion takes longer than what it saves.
    let small = [
        ("model.hidden_size", json!(512)),
        ("train.matmuls", json!("fp8")),
    ];
    let settings = large("none", "none", &small);
    let plan = Plan::new(&settings, known_h200(&settings, None)).unwrap();
    assert!(plan.to_string().contains(" % more time"), "{plan}");
}
