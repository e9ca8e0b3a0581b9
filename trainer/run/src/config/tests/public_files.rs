//! Structures of public DeepSpeed files, each with its source and what it must become here.

use serde_json::{Value, json};

/// Merges `more` into `base`, table by table.
pub(super) fn with(base: &Value, more: Value) -> Value {
    match (base, more) {
        (Value::Object(base), Value::Object(more)) => {
            let mut both = base.clone();
            for (key, value) in more {
                let below = both.get(&key).cloned().unwrap_or(Value::Null);
                both.insert(key, with(&below, value));
            }
            both.into()
        }
        (_, more) => more,
    }
}

/// Sizes that the Trainer fills in.
pub(super) fn sizes() -> Value {
    json!({
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto"
    })
}

pub(super) fn both_precisions() -> Value {
    json!({
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
    })
}

pub(super) fn auto_adamw() -> Value {
    json!({"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}})
}

fn warmup(kind: &str) -> Value {
    let mut params =
        json!({"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"});
    if kind == "WarmupDecayLR" {
        params["total_num_steps"] = "auto".into();
    }
    json!({"scheduler": {"type": kind, "params": params}})
}

pub(super) fn stage_3() -> Value {
    json!({"zero_optimization": {
        "stage": 3, "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true
    }})
}

fn stage_2() -> Value {
    json!({"zero_optimization": {
        "stage": 2, "allgather_partitions": true, "allgather_bucket_size": 2e8, "overlap_comm": true, "reduce_scatter": true,
        "reduce_bucket_size": 2e8, "contiguous_gradients": true
    }})
}

fn cpu(what: &[&str]) -> Value {
    let device = json!({"device": "cpu", "pin_memory": true});
    let tables = what
        .iter()
        .map(|what| (format!("offload_{what}"), device.clone()));
    json!({"zero_optimization": tables.collect::<serde_json::Map<_, _>>()})
}

pub(super) fn all(parts: &[Value]) -> Value {
    parts
        .iter()
        .fold(json!({}), |sum, part| with(&sum, part.clone()))
}

/// Axolotl's stage 3 file, with the fields' names instead of their aliases.
fn axolotl_3() -> Value {
    json!({
        "zero_optimization": {
            "stage": 3, "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 0, "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto", "max_live_parameters": 0,
            "max_reuse_distance": 0, "gather_16bit_weights_on_model_save": true
        },
        "wall_clock_breakdown": false
    })
}

/// Source, structure, and the expected summary or a part of the expected error.
#[expect(clippy::too_many_lines, reason = "a table")]
pub(super) fn files() -> Vec<(&'static str, Value, Result<&'static str, &'static str>)> {
    let axolotl_fp16 = json!({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "auto_cast": false, "initial_scale_power": 32}});
    let axolotl = all(&[sizes(), axolotl_fp16]);
    let compile = json!({"compile": {"disable": false, "backend": "inductor"}});
    let bf16 = json!({"bf16": {"enabled": true}, "fp16": null});
    let untested =
        json!({"zero_force_ds_cpu_optimizer": false, "zero_allow_untested_optimizer": true});
    let factory = all(&[
        sizes(),
        both_precisions(),
        json!({"zero_allow_untested_optimizer": true}),
    ]);
    let instruct = all(&[
        sizes(),
        json!({"bf16": {"enabled": "auto"}, "steps_per_print": 1e5}),
    ]);
    let fp16 = json!({"fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16}});
    let adam = |params: Value| json!({"optimizer": {"type": "Adam", "params": params}});
    let template = all(&[
        sizes(),
        fp16.clone(),
        json!({"gradient_accumulation_steps": 1, "steps_per_print": 2000}),
        json!({"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": true, "adam_w_mode": true}}}),
        warmup("WarmupDecayLR"),
    ]);
    let linear = |stage: &'static str| Ok::<&str, &str>(stage);
    vec![
        (
            "axolotl-ai-cloud/axolotl deepspeed_configs/zero1.json",
            all(&[
                axolotl.clone(),
                json!({"zero_optimization": {"stage": 1, "overlap_comm": true}}),
            ]),
            linear("bf16 stage 1 none/none lr 5e-5 linear decay 0 clip 1"),
        ),
        (
            "axolotl-ai-cloud/axolotl deepspeed_configs/zero1_torch_compile.json",
            all(&[
                axolotl.clone(),
                compile.clone(),
                json!({"zero_optimization": {"stage": 1, "overlap_comm": true}}),
            ]),
            linear("bf16 stage 1 none/none lr 5e-5 linear decay 0 clip 1"),
        ),
        (
            "axolotl-ai-cloud/axolotl deepspeed_configs/zero2.json",
            all(&[
                axolotl.clone(),
                json!({"zero_optimization": {"stage": 2}}),
                cpu(&["optimizer"]),
            ]),
            linear("bf16 stage 2 none/cpu lr 5e-5 linear decay 0 clip 1"),
        ),
        (
            "axolotl-ai-cloud/axolotl deepspeed_configs/zero2_torch_compile.json",
            all(&[
                axolotl.clone(),
                compile,
                json!({"zero_optimization": {"stage": 2}}),
                cpu(&["optimizer"]),
            ]),
            linear("bf16 stage 2 none/cpu lr 5e-5 linear decay 0 clip 1"),
        ),
        (
            "axolotl-ai-cloud/axolotl deepspeed_configs/zero3.json",
            all(&[axolotl.clone(), axolotl_3()]),
            linear("bf16 stage 3 none/none lr 5e-5 linear decay 0 clip 1"),
        ),
        (
            "axolotl-ai-cloud/axolotl deepspeed_configs/zero3_bf16.json",
            all(&[axolotl.clone(), axolotl_3(), bf16.clone()]),
            linear("bf16 stage 3 none/none lr 5e-5 linear decay 0 clip 1"),
        ),
        (
            "axolotl-ai-cloud/axolotl deepspeed_configs/zero3_bf16_cpuoffload_all.json",
            all(&[
                axolotl.clone(),
                axolotl_3(),
                bf16.clone(),
                untested.clone(),
                cpu(&["param", "optimizer"]),
            ]),
            linear("bf16 stage 3 cpu/cpu lr 5e-5 linear decay 0 clip 1"),
        ),
        (
            "axolotl-ai-cloud/axolotl deepspeed_configs/zero3_bf16_cpuoffload_params.json",
            all(&[axolotl, axolotl_3(), bf16, untested, cpu(&["param"])]),
            linear("bf16 stage 3 cpu/none lr 5e-5 linear decay 0 clip 1"),
        ),
        (
            "hiyouga/LLaMA-Factory examples/deepspeed/ds_z0_config.json",
            all(&[
                factory.clone(),
                stage_2(),
                json!({"zero_optimization": {"stage": 0, "round_robin_gradients": true}}),
            ]),
            linear("bf16 stage 0 none/none lr 5e-5 linear decay 0 clip 1"),
        ),
        (
            "hiyouga/LLaMA-Factory examples/deepspeed/ds_z2_config.json",
            all(&[factory.clone(), stage_2()]),
            linear("bf16 stage 2 none/none lr 5e-5 linear decay 0 clip 1"),
        ),
        (
            "hiyouga/LLaMA-Factory examples/deepspeed/ds_z2_offload_config.json",
            all(&[factory.clone(), stage_2(), cpu(&["optimizer"])]),
            linear("bf16 stage 2 none/cpu lr 5e-5 linear decay 0 clip 1"),
        ),
        (
            "hiyouga/LLaMA-Factory examples/deepspeed/ds_z2_autotp_config.json",
            all(&[
                factory.clone(),
                stage_2(),
                json!({"_comment": "models it fits", "tensor_parallel": {"autotp_size": 2}}),
            ]),
            Err(
                "tensor_parallel is DeepSpeed's but not supported here: leave it out: ranks divide batches and sequences",
            ),
        ),
        (
            "hiyouga/LLaMA-Factory examples/deepspeed/ds_z3_config.json",
            all(&[factory.clone(), stage_3()]),
            linear("bf16 stage 3 none/none lr 5e-5 linear decay 0 clip 1"),
        ),
        (
            "hiyouga/LLaMA-Factory examples/deepspeed/ds_z3_offload_config.json",
            all(&[factory.clone(), stage_3(), cpu(&["param", "optimizer"])]),
            linear("bf16 stage 3 cpu/cpu lr 5e-5 linear decay 0 clip 1"),
        ),
        (
            "hiyouga/LLaMA-Factory examples/deepspeed/ds_z3_fp8_config.json",
            all(&[
                factory,
                stage_3(),
                cpu(&["optimizer"]),
                json!({
                    "fp16": {"enabled": false}, "zero_force_ds_cpu_optimizer": true, "steps_per_print": 10_000_000,
                    "comms_config": {"verbose": false}, "monitor_config": {"enabled": true, "tag": "DeepSpeedMonitor"}
                }),
            ]),
            linear("bf16 stage 3 none/cpu lr 5e-5 linear decay 0 clip 1"),
        ),
        (
            "allenai/open-instruct configs/ds_configs/stage2_no_offloading_accelerate.conf",
            all(&[
                instruct.clone(),
                json!({"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}),
            ]),
            linear("bf16 stage 2 none/none lr 5e-5 linear decay 0 clip 1"),
        ),
        (
            "allenai/open-instruct configs/ds_configs/stage3_no_offloading_accelerate.conf",
            all(&[instruct.clone(), stage_3()]),
            linear("bf16 stage 3 none/none lr 5e-5 linear decay 0 clip 1"),
        ),
        (
            "allenai/open-instruct configs/ds_configs/stage3_offloading_accelerate.conf",
            all(&[instruct.clone(), stage_3(), cpu(&["param", "optimizer"])]),
            linear("bf16 stage 3 cpu/cpu lr 5e-5 linear decay 0 clip 1"),
        ),
        (
            "allenai/open-instruct configs/ds_configs/stage3_no_offloading.conf",
            all(&[
                instruct.clone(),
                stage_3(),
                auto_adamw(),
                warmup("WarmupDecayLR"),
            ]),
            Ok("bf16 stage 3 none/none lr 5e-5 WarmupDecayLR decay 0 clip 1"),
        ),
        (
            "allenai/open-instruct configs/ds_configs/stage3_offloading.conf",
            all(&[
                instruct,
                stage_3(),
                auto_adamw(),
                warmup("WarmupDecayLR"),
                cpu(&["param", "optimizer"]),
            ]),
            Ok("bf16 stage 3 cpu/cpu lr 5e-5 WarmupDecayLR decay 0 clip 1"),
        ),
        (
            "huggingface/transformers tests/deepspeed/ds_config_zero2.json",
            all(&[
                sizes(),
                both_precisions(),
                auto_adamw(),
                warmup("WarmupLR"),
                stage_2(),
                cpu(&["optimizer"]),
            ]),
            Ok("bf16 stage 2 none/cpu lr 5e-5 WarmupLR decay 0 clip 1"),
        ),
        (
            "huggingface/transformers tests/deepspeed/ds_config_zero3.json",
            all(&[
                sizes(),
                both_precisions(),
                auto_adamw(),
                warmup("WarmupLR"),
                stage_3(),
                cpu(&["param", "optimizer"]),
            ]),
            Ok("bf16 stage 3 cpu/cpu lr 5e-5 WarmupLR decay 0 clip 1"),
        ),
        (
            "huggingface/transformers tests/deepspeed/ds_config_zero3.json, as of 2021: no batch sizes",
            all(&[
                fp16.clone(),
                stage_3(),
                cpu(&["param", "optimizer"]),
                json!({
                    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
                    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}}
                }),
            ]),
            Err("train_micro_batch_size_per_gpu is missing: set it, or train_batch_size"),
        ),
        (
            "huggingface/transformers docs/source/en/deepspeed.md, NVMe",
            all(&[
                sizes(),
                both_precisions(),
                auto_adamw(),
                warmup("WarmupLR"),
                stage_3(),
                json!({"zero_optimization": {
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 4, "fast_init": false},
                    "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
                    "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": false, "overlap_events": true}
                }}),
            ]),
            Ok("bf16 stage 3 nvme/nvme lr 5e-5 WarmupLR decay 0 clip 1"),
        ),
        (
            "huggingface/transformers docs/source/en/deepspeed.md, ZeRO-1 alone",
            all(&[sizes(), json!({"zero_optimization": {"stage": 1}})]),
            linear("fp32 stage 1 none/none lr 5e-5 linear decay 0 clip 1"),
        ),
        (
            "huggingface/transformers docs/source/en/deepspeed.md, optimizer without scheduler",
            all(&[sizes(), both_precisions(), auto_adamw(), stage_3()]),
            Ok("bf16 stage 3 none/none lr 5e-5 linear decay 0 clip 1"),
        ),
        (
            "huggingface/accelerate examples/deepspeed_config_templates/zero_stage1_config.json",
            all(&[
                template.clone(),
                stage_2(),
                json!({"zero_optimization": {"stage": 1}}),
            ]),
            Ok("fp16 stage 1 none/none lr 5e-5 WarmupDecayLR decay 0 clip 1"),
        ),
        (
            "huggingface/accelerate examples/deepspeed_config_templates/zero_stage2_offload_config.json",
            all(&[template.clone(), stage_2(), cpu(&["optimizer"])]),
            Ok("fp16 stage 2 none/cpu lr 5e-5 WarmupDecayLR decay 0 clip 1"),
        ),
        (
            "huggingface/accelerate examples/deepspeed_config_templates/zero_stage3_offload_config.json",
            all(&[
                template,
                stage_3(),
                cpu(&["param", "optimizer"]),
                json!({"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": "auto"}}),
            ]),
            Ok("fp16 stage 3 cpu/cpu lr 5e-5 WarmupDecayLR decay 0 clip 1"),
        ),
        (
            "huggingface/accelerate tests/deepspeed/ds_config_zero3_model_only.json",
            all(&[
                both_precisions(),
                stage_3(),
                cpu(&["param"]),
                json!({"train_micro_batch_size_per_gpu": 1}),
            ]),
            linear("bf16 stage 3 cpu/none lr 5e-5 linear decay 0 clip 1"),
        ),
        (
            "deepspeedai/DeepSpeedExamples training/gan/gan_deepspeed_config.json",
            all(&[
                json!({"train_batch_size": 64, "steps_per_print": 10}),
                adam(json!({"lr": 2e-4, "betas": [0.5, 0.999], "eps": 1e-8})),
            ]),
            Ok("fp32 stage 3 none/none lr 2e-4 constant decay 0 clip 1"),
        ),
        (
            "deepspeedai/DeepSpeedExamples training/imagenet/config/ds_fp16_z1_config.json",
            all(&[
                json!({
                    "train_batch_size": 256, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 1}, "gradient_clipping": 0,
                    "fp16": {"enabled": true, "auto_cast": true}, "prescale_gradients": false, "cuda_visible_devices": 0
                }),
                adam(json!({"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7})),
            ]),
            Ok("fp16 stage 1 none/none lr 1e-3 constant decay 0.0000003 clip 0"),
        ),
        (
            "deepspeedai/DeepSpeedExamples training/bf16_master_weight/configs/baseline.json",
            all(&[json!({
                "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "bf16": {"enabled": true},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}}, "torch_autocast": {"enabled": false},
                "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e7, "stage3_param_persistence_threshold": 0}
            })]),
            Ok("bf16 stage 3 none/none lr 1e-4 constant decay 0.01 clip 1"),
        ),
        (
            "deepspeedai/DeepSpeedExamples training/bf16_master_weight/configs/bf16_full.json",
            json!({"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true},
                "torch_autocast": {"enabled": true, "dtype": "torch.bfloat16"}}),
            Err("torch_autocast"),
        ),
        (
            "deepspeedai/DeepSpeedExamples training/BingBertSquad/deepspeed_bsz24_config.json",
            all(&[
                json!({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3, "fp16": {"enabled": true}}),
                adam(json!({"lr": 3e-5, "weight_decay": 0.0, "bias_correction": false})),
            ]),
            Err("optimizer.params.bias_correction is DeepSpeed's but not supported here"),
        ),
        (
            "deepspeedai/DeepSpeedExamples training/bing_bert/deepspeed_bsz32k_lamb_config_seq512.json",
            json!({"train_batch_size": 32768, "train_micro_batch_size_per_gpu": 16, "fp16": {"enabled": true, "loss_scale": 0},
                "optimizer": {"type": "Lamb", "params": {"lr": 2e-3, "weight_decay": 0.01, "max_coeff": 0.3, "min_coeff": 0.01}}}),
            Err("optimizer.type: \"Lamb\" is not supported"),
        ),
        (
            "deepspeedai/DeepSpeedExamples training/bing_bert/deepspeed_bsz4k_progressive_layer_drop_config_seq128.json",
            all(&[
                json!({"train_batch_size": 4096, "train_micro_batch_size_per_gpu": 16, "fp16": {"enabled": true},
                "progressive_layer_drop": {"enabled": true, "theta": 0.5, "gamma": 0.001}}),
                adam(json!({"lr": 1e-3})),
            ]),
            Err("progressive_layer_drop is DeepSpeed's but not supported here"),
        ),
        (
            "deepspeedai/DeepSpeedExamples training/DeepSpeed-ZenFlow/finetuning/zf_config.json",
            all(&[
                json!({"train_batch_size": 8, "bf16": {"enabled": true}, "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}},
                "zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1, "update_interval": 4, "overlap_step": true}}}),
                cpu(&["optimizer"]),
            ]),
            Err("zero_optimization.zenflow is DeepSpeed's but not supported here"),
        ),
        (
            "deepspeedai/DeepSpeedExamples inference/sglang/ds_offload_nvme_aio.json",
            json!({"train_batch_size": 1, "aio": {"block_size": 8388608, "queue_depth": 32, "intra_op_parallelism": 8, "use_gds": false},
                "zero_optimization": {"stage": 3, "stage3_max_live_parameters": "auto",
                    "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_size": "auto", "buffer_count": 5}}}),
            Err("\"none\" is not possible with parameters on nvme"),
        ),
        (
            "deepspeedai/DeepSpeed examples/sdma_allgather/ds_config_zero3.json",
            all(&[
                stage_3(),
                json!({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "bf16": {"enabled": true},
                "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.999], "weight_decay": 0.01}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-5, "warmup_num_steps": 10}}}),
            ]),
            Ok("bf16 stage 3 none/none lr 1e-5 WarmupLR decay 0.01 clip 1"),
        ),
        (
            "deepspeedai/DeepSpeed tests/model/Megatron_GPT2/ds_config_func_bs4_zero2_offload.json",
            all(&[
                fp16,
                json!({"train_batch_size": 4, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
                "zero_optimization": {"stage": 2, "reduce_bucket_size": 7_000_000, "reduce_scatter": true, "cpu_offload": true}}),
            ]),
            linear("fp16 stage 2 none/cpu lr 5e-5 linear decay 0 clip 1"),
        ),
    ]
}
