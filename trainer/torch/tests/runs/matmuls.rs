//! Products in 8 bits in whole runs. Errors that these tests find: a setting that does not reach the computation, other bits where the
//! state lies elsewhere or micro-batches come in other groups, a resume that goes on in another way without a word.

use kernels::fp8::fp8_refusal;
use kernels::gpu::Gpu;

use crate::harness::Harness;

#[test]
fn runs_in_8_bits_train_near_those_in_bf16_with_the_same_bits_anywhere() {
    let refused = match Gpu::open(0) {
        Ok(gpu) => fp8_refusal(gpu.info().vendor, &gpu.info().arch),
        Err(error) => {
            assert!(error.is_absent(), "{error}");
            Some(error.to_string())
        }
    };
    if let Some(why) = refused {
        println!(
            "skipped: runs_in_8_bits_train_near_those_in_bf16_with_the_same_bits_anywhere: {why}"
        );
        return;
    }
    let harness = Harness::new();
    let sets = [
        "train.device=gpu",
        "bf16.enabled=true",
        "gradient_accumulation_steps=3",
        "train_micro_batch_size_per_gpu=4",
    ];
    let trained = |name: &str, own: &[&str]| {
        let run = harness.run(name, &sets).with(own);
        run.train();
        (run.bits("loss"), run.bits("grad_norm"), run.fingerprint())
    };
    let eight = trained("eight", &["train.matmuls=fp8"]);
    for (name, own) in [
        ("again", ["train.matmuls=fp8", "train.micro_batch_group=3"]),
        ("groups", ["train.matmuls=fp8", "train.micro_batch_group=1"]),
        (
            "recomputed",
            ["train.matmuls=fp8", "train.activation_checkpointing=full"],
        ),
        (
            "host",
            [
                "train.matmuls=fp8",
                "zero_optimization.offload_optimizer={device = \"cpu\"}",
            ],
        ),
    ] {
        assert_eq!(trained(name, &own), eight, "{name}");
    }
    let own = trained("own", &[]);
    for (eight, own) in eight.0.iter().zip(&own.0) {
        let [eight, own] = [eight, own].map(|bits| f64::from_bits(*bits));
        assert!(
            eight != own && (eight / own - 1.0).abs() < 0.05,
            "{eight} and {own}"
        );
    }
}

#[test]
fn products_in_8_bits_are_refused_without_a_gpu() {
    let harness = Harness::new();
    let said = harness
        .run("cpu", &["train.device=cpu", "train.matmuls=fp8"])
        .refused();
    assert!(
        said.contains("train.matmuls is \"fp8\"") && said.contains("there is no GPU"),
        "{said}"
    );
}
