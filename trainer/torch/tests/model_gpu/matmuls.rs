//! Products in 8 bits compared with torch's operators, for every form of block that has them.

use kernels::fp8::fp8_refusal;
use trainer_torch::compute::ComputeDevice;
use training_run::computation::{ActivationCheckpointing, Matmuls, block_is_written_out};
use training_run::model::Dtype;

use crate::case::{Case, cases, forms};
use crate::on_gpu;

/// The matrix units add forward products in fewer bits than torch operators, and a number beside the middle between two of 8 bits
/// then becomes the other one.
#[test]
fn products_in_8_bits_are_those_of_torch_operators_and_repeat() {
    on_gpu(
        "matmuls::products_in_8_bits_are_those_of_torch_operators_and_repeat",
        |gpu| {
            if let Some(why) = fp8_refusal(gpu.info().vendor, &gpu.info().arch) {
                println!("skipped: {why}: products in 8 bits");
                return;
            }
            let gpu = ComputeDevice::Gpu(gpu);
            let starts: [&[usize]; 2] = [&[], &[3, 40, 41, 100, 134, 190]];
            let mut seen = 0;
            for case in forms(Dtype::Bf16).into_iter().chain(cases(Dtype::Bf16)) {
                let config = &case.config;
                let sizes = [
                    config.hidden_size,
                    config.intermediate_size,
                    config.kv_heads * config.head_dim(),
                ];
                if sizes.iter().any(|size| size % 16 != 0)
                    || !block_is_written_out(config, &case.dropout)
                {
                    continue;
                }
                for starts in starts {
                    let case = Case {
                        starts,
                        config: config.clone(),
                        seq_len: 80,
                        ..case
                    };
                    let engine = || case.engine(&gpu).with_matmuls(Matmuls::Fp8).unwrap();
                    let plain = case.step(&case.engine(&gpu).with_plain_fp8());
                    let first = case.step(&engine());
                    let kind = config.architecture.model_type();
                    let what = format!("8 bits, {kind}, hidden size {}", config.hidden_size);
                    case.assert_close(&what, &engine(), &plain, &first, 0.3);
                    for keep in [
                        ActivationCheckpointing::Full,
                        ActivationCheckpointing::Attention,
                        ActivationCheckpointing::Matmuls,
                    ] {
                        let again = case.step(&engine().with_checkpointing(keep));
                        assert_eq!(
                            first.loss.to_bits(),
                            again.loss.to_bits(),
                            "{kind}, {keep:?}"
                        );
                        assert!(first.grads == again.grads, "{kind}, {keep:?}");
                    }
                    let in_bf16 = case.step(&case.engine(&gpu));
                    assert!(first.grads != in_bf16.grads, "8 bits change the numbers");
                    seen += 1;
                }
            }
            assert!(seen >= 8, "{seen} cases");
        },
    );
}
