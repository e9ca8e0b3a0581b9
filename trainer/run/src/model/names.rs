//! Names and layouts of parameters in Hugging Face's checkpoints: the table used for reading and writing.
//!
//! ```text
//! here                    Llama, Qwen2, Qwen3, Mistral                     GPT-2
//! Embedding               model.embed_tokens.weight                        transformer.wte.weight
//! Query [outputs, inputs] model.layers.N.self_attn.q_proj.weight           transformer.h.N.attn.c_attn.weight, [inputs,
//!                                                                          3 * outputs]: the first third, transposed
//! ```
//!
//! A file of a bare model (without a language model head) has the same names without the first component.

use super::{Architecture, ModelConfig, ParamRole, unit_layouts};

/// Name of the projection's tensor in all architectures.
pub const PROJECTION: &str = "lm_head.weight";

/// Place of a parameter in a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamLocation {
    /// Name of the tensor in written files.
    pub name: String,
    /// Whether the matrix is stored as [inputs, outputs].
    pub transposed: bool,
    /// The part of the tensor that is this parameter, if several parameters are stored side by side along
    /// their outputs.
    pub part: TensorPart,
}

/// Position among the parameters in one tensor; (0, 1) for a parameter with its own tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorPart {
    /// Index of the parameter.
    pub index: usize,
    /// Number of parameters in the tensor.
    pub count: usize,
}

impl ParamLocation {
    /// Names under which a file may contain the tensor, the written one first. Files of bare models omit the
    /// first component.
    pub fn names(&self) -> Vec<&str> {
        let bare = ["model.", "transformer."]
            .iter()
            .find_map(|prefix| self.name.strip_prefix(prefix));
        [self.name.as_str()].into_iter().chain(bare).collect()
    }

    /// Shape of the whole tensor in the file for a parameter of `shape`.
    pub fn stored_shape(&self, shape: &[usize]) -> Vec<usize> {
        let mut stored = shape.to_vec();
        stored[0] *= self.part.count;
        if self.transposed {
            stored.reverse();
        }
        stored
    }

    /// Converts element `elem` of a parameter of `shape`, counted row by row in [outputs, inputs], to its
    /// position in the file's tensor.
    pub fn stored_elem(&self, shape: &[usize], elem: usize) -> usize {
        let inputs: usize = shape[1..].iter().product();
        let (output, input) = (elem / inputs, elem % inputs);
        let output = output + self.part.index * shape[0];
        if self.transposed {
            input * shape[0] * self.part.count + output
        } else {
            output * inputs + input
        }
    }

    /// Name of this parameter alone.
    pub(super) fn label(&self) -> String {
        if self.part.count == 1 {
            return self.name.clone();
        }
        let which = ["query", "key", "value"][self.part.index];
        format!("{}[{which}]", self.name)
    }
}

/// Places of all parameters: `[unit][parameter]`, in the order of [`unit_layouts`].
pub fn param_locations(config: &ModelConfig) -> Vec<Vec<ParamLocation>> {
    let units = unit_layouts(config).into_iter().enumerate();
    units
        .map(|(unit, layout)| {
            let params = layout.params.iter();
            params
                .map(|param| param_location(config, unit, param.member))
                .collect()
        })
        .collect()
}

/// Place of the parameter of unit number `unit` with this role.
pub fn param_location(config: &ModelConfig, unit: usize, member: ParamRole) -> ParamLocation {
    match config.architecture {
        Architecture::Gpt2 => gpt2(unit, member),
        Architecture::Llama | Architecture::Mistral | Architecture::Qwen2 | Architecture::Qwen3 => {
            llama(unit, member)
        }
    }
}

/// Returns whether a checkpoint may contain a tensor of this name that is not read: tables stored by older
/// versions, and the repeated projection of a tied model.
pub fn is_left_aside(config: &ModelConfig, name: &str) -> bool {
    let table = [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"]
        .iter()
        .any(|end| name.ends_with(end));
    table || (config.tied && name == PROJECTION)
}

fn whole(name: String) -> ParamLocation {
    ParamLocation {
        name,
        transposed: false,
        part: TensorPart { index: 0, count: 1 },
    }
}

fn llama(unit: usize, member: ParamRole) -> ParamLocation {
    let name = match member {
        ParamRole::Embedding => return whole("model.embed_tokens.weight".into()),
        ParamRole::FinalNorm => return whole("model.norm.weight".into()),
        ParamRole::Projection => return whole(PROJECTION.into()),
        ParamRole::InputNorm => "input_layernorm.weight",
        ParamRole::Query => "self_attn.q_proj.weight",
        ParamRole::Key => "self_attn.k_proj.weight",
        ParamRole::Value => "self_attn.v_proj.weight",
        ParamRole::QueryBias => "self_attn.q_proj.bias",
        ParamRole::KeyBias => "self_attn.k_proj.bias",
        ParamRole::ValueBias => "self_attn.v_proj.bias",
        ParamRole::QueryNorm => "self_attn.q_norm.weight",
        ParamRole::KeyNorm => "self_attn.k_norm.weight",
        ParamRole::Out => "self_attn.o_proj.weight",
        ParamRole::OutBias => "self_attn.o_proj.bias",
        ParamRole::PostNorm => "post_attention_layernorm.weight",
        ParamRole::Gate => "mlp.gate_proj.weight",
        ParamRole::GateBias => "mlp.gate_proj.bias",
        ParamRole::Up => "mlp.up_proj.weight",
        ParamRole::UpBias => "mlp.up_proj.bias",
        ParamRole::Down => "mlp.down_proj.weight",
        ParamRole::DownBias => "mlp.down_proj.bias",
        ParamRole::Positions
        | ParamRole::InputNormBias
        | ParamRole::PostNormBias
        | ParamRole::FinalNormBias => panic!("Llama and similar models have no {member:?}"),
    };
    assert!(unit > 0, "{member:?} belongs to a block");
    whole(format!("model.layers.{}.{name}", unit - 1))
}

fn gpt2(unit: usize, member: ParamRole) -> ParamLocation {
    let third = |index| TensorPart { index, count: 3 };
    let one = TensorPart { index: 0, count: 1 };
    // Matrices are stored as [inputs, outputs] (`Conv1D`).
    let (name, transposed, part) = match member {
        ParamRole::Embedding => return whole("transformer.wte.weight".into()),
        ParamRole::Positions => return whole("transformer.wpe.weight".into()),
        ParamRole::FinalNorm => return whole("transformer.ln_f.weight".into()),
        ParamRole::FinalNormBias => return whole("transformer.ln_f.bias".into()),
        ParamRole::Projection => return whole(PROJECTION.into()),
        ParamRole::InputNorm => ("ln_1.weight", false, one),
        ParamRole::InputNormBias => ("ln_1.bias", false, one),
        ParamRole::Query => ("attn.c_attn.weight", true, third(0)),
        ParamRole::Key => ("attn.c_attn.weight", true, third(1)),
        ParamRole::Value => ("attn.c_attn.weight", true, third(2)),
        ParamRole::QueryBias => ("attn.c_attn.bias", false, third(0)),
        ParamRole::KeyBias => ("attn.c_attn.bias", false, third(1)),
        ParamRole::ValueBias => ("attn.c_attn.bias", false, third(2)),
        ParamRole::Out => ("attn.c_proj.weight", true, one),
        ParamRole::OutBias => ("attn.c_proj.bias", false, one),
        ParamRole::PostNorm => ("ln_2.weight", false, one),
        ParamRole::PostNormBias => ("ln_2.bias", false, one),
        ParamRole::Up => ("mlp.c_fc.weight", true, one),
        ParamRole::UpBias => ("mlp.c_fc.bias", false, one),
        ParamRole::Down => ("mlp.c_proj.weight", true, one),
        ParamRole::DownBias => ("mlp.c_proj.bias", false, one),
        ParamRole::QueryNorm | ParamRole::KeyNorm | ParamRole::Gate | ParamRole::GateBias => {
            panic!("GPT-2 has no {member:?}")
        }
    };
    assert!(unit > 0, "{member:?} belongs to a block");
    ParamLocation {
        name: format!("transformer.h.{}.{name}", unit - 1),
        transposed,
        part,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(architecture: Architecture) -> ModelConfig {
        ModelConfig {
            architecture,
            vocab_size: 11,
            hidden_size: 8,
            intermediate_size: 12,
            layers: 2,
            heads: 2,
            kv_heads: 2,
            biases: architecture.form().biases,
            max_position_embeddings: 16,
            ..ModelConfig::default()
        }
    }

    #[test]
    fn every_parameter_has_its_own_place() {
        for architecture in Architecture::ALL {
            let config = config(*architecture);
            let units = unit_layouts(&config);
            let mut seen = std::collections::HashSet::new();
            for (places, unit) in param_locations(&config).iter().zip(&units) {
                for (place, param) in places.iter().zip(&unit.params) {
                    for elem in 0..param.elems() {
                        let stored = place.stored_elem(&param.shape, elem);
                        let size: usize = place.stored_shape(&param.shape).iter().product();
                        assert!(stored < size, "{architecture:?}: {}", param.name);
                        assert!(
                            seen.insert((place.name.clone(), stored)),
                            "{architecture:?}: {} overlaps another parameter",
                            param.name
                        );
                    }
                }
            }
            assert_eq!(seen.len(), config.params_count());
        }
    }

    #[test]
    fn gpt2s_fused_projection_is_split_and_transposed() {
        let place = param_location(&config(Architecture::Gpt2), 2, ParamRole::Key);
        assert_eq!(place.name, "transformer.h.1.attn.c_attn.weight");
        assert_eq!(place.names()[1], "h.1.attn.c_attn.weight");
        assert_eq!(place.stored_shape(&[8, 8]), [8, 24]);
        // Output 1, input 2: row 2, column 8 + 1.
        assert_eq!(place.stored_elem(&[8, 8], 10), 2 * 24 + 9);
    }

    #[test]
    fn tables_that_are_not_parameters_are_ignored() {
        let config = ModelConfig {
            tied: true,
            ..config(Architecture::Gpt2)
        };
        assert!(is_left_aside(&config, "h.0.attn.bias"));
        assert!(is_left_aside(&config, "lm_head.weight"));
        assert!(!is_left_aside(&config, "transformer.h.0.attn.c_attn.bias"));
        let untied = ModelConfig {
            tied: false,
            ..config
        };
        assert!(!is_left_aside(&untied, "lm_head.weight"));
    }
}
