//! Position of each parameter in its unit's flat buffer. A layout depends only on the configuration. It is
//! stored in a job's record, so changing it changes the format.

use serde::{Deserialize, Serialize};

use super::{Mlp, ModelConfig, Norm, ParamRole, Positions, names};

/// Each parameter starts at a multiple of this many elements, and each unit's length is a multiple of it: 128
/// bytes in 16 bits, so that vector loads and tensors over the buffer are aligned.
pub const ALIGN_ELEMS: usize = 64;

/// Initial value of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum InitialValue {
    /// Normally distributed numbers with `scale` times the configuration's `initializer_range`.
    Normal {
        /// 1, or less for a matrix that writes to the residual stream if the architecture scales it.
        scale: f64,
    },
    /// A norm's weight.
    Ones,
    /// A bias.
    Zeros,
}

/// One parameter inside its unit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ParamLayout {
    /// Role of the parameter in its unit.
    pub member: ParamRole,
    /// Hugging Face's name, as in a checkpoint. If several parameters are one tensor there, the part follows
    /// in brackets (`names.rs`).
    pub name: String,
    /// Sizes, outermost first; a matrix is [outputs, inputs].
    pub shape: Vec<usize>,
    /// Offset in the unit's flat buffer.
    pub offset_elems: usize,
    /// Whether weight decay applies by default: to matrices, not to norms and biases.
    pub decay: bool,
    /// Initial value in a fresh model.
    pub start: InitialValue,
}

impl ParamLayout {
    /// Number of elements of the parameter.
    pub fn elems(&self) -> usize {
        self.shape.iter().product()
    }

    /// Range of elements in the unit's flat buffer.
    pub fn range_elems(&self) -> std::ops::Range<usize> {
        self.offset_elems..self.offset_elems + self.elems()
    }
}

/// Returns whether parameters follow each other in their unit without padding between them.
pub fn adjacent(params: &[ParamLayout]) -> bool {
    params
        .windows(2)
        .all(|pair| pair[0].range_elems().end == pair[1].offset_elems)
}

/// One unit: parameters that are gathered together in one flat buffer. Elements between parameters are
/// padding, which is zero in weights and gradients.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct UnitLayout {
    /// `embedding`, `block.N`, `head`.
    pub name: String,
    /// Parameters in the order of the buffer.
    pub params: Vec<ParamLayout>,
    /// Length of the flat buffer, including padding.
    pub elems: usize,
}

impl UnitLayout {
    fn new(
        config: &ModelConfig,
        unit: usize,
        name: impl Into<String>,
        members: Vec<(ParamRole, Vec<usize>)>,
    ) -> Self {
        let mut end = 0usize;
        let params = members
            .into_iter()
            .map(|(member, shape)| {
                let param = ParamLayout {
                    member,
                    name: names::param_location(config, unit, member).label(),
                    offset_elems: end,
                    decay: shape.len() > 1,
                    start: start(config, member),
                    shape,
                };
                end = (end + param.elems()).next_multiple_of(ALIGN_ELEMS);
                param
            })
            .collect();
        UnitLayout {
            name: name.into(),
            params,
            elems: end,
        }
    }

    /// Returns the index of the parameter with this role, if the unit has it.
    pub fn find(&self, member: ParamRole) -> Option<usize> {
        self.params.iter().position(|param| param.member == member)
    }
}

/// Units of the model in forward order: embedding, blocks, head.
pub fn unit_layouts(config: &ModelConfig) -> Vec<UnitLayout> {
    let (h, vocab) = (config.hidden_size, config.vocab_size);
    let form = config.architecture.form();
    let mut embedding = vec![(ParamRole::Embedding, vec![vocab, h])];
    if form.positions == Positions::Learned {
        embedding.push((
            ParamRole::Positions,
            vec![config.max_position_embeddings, h],
        ));
    }
    let mut units = vec![UnitLayout::new(config, 0, "embedding", embedding)];
    for layer in 0..config.layers {
        let name = format!("block.{layer}");
        units.push(UnitLayout::new(config, layer + 1, name, block(config)));
    }
    let mut head = vec![(ParamRole::FinalNorm, vec![h])];
    if form.norm == Norm::Layer {
        head.push((ParamRole::FinalNormBias, vec![h]));
    }
    if !config.tied {
        head.push((ParamRole::Projection, vec![vocab, h]));
    }
    units.push(UnitLayout::new(config, config.layers + 1, "head", head));
    units
}

/// Parameters of a block. Those that are multiplied by the same input are adjacent, and so are their biases.
fn block(config: &ModelConfig) -> Vec<(ParamRole, Vec<usize>)> {
    let form = config.architecture.form();
    let (h, ff, d) = (
        config.hidden_size,
        config.intermediate_size,
        config.head_dim(),
    );
    let (q, kv) = (config.heads * d, config.kv_heads * d);
    let layer_norm = form.norm == Norm::Layer;
    let gated = form.mlp == Mlp::GatedSilu;
    let biases = config.biases;
    let members = [
        (true, ParamRole::InputNorm, vec![h]),
        (layer_norm, ParamRole::InputNormBias, vec![h]),
        (true, ParamRole::Query, vec![q, h]),
        (true, ParamRole::Key, vec![kv, h]),
        (true, ParamRole::Value, vec![kv, h]),
        (biases.qkv, ParamRole::QueryBias, vec![q]),
        (biases.qkv, ParamRole::KeyBias, vec![kv]),
        (biases.qkv, ParamRole::ValueBias, vec![kv]),
        (form.qk_norm, ParamRole::QueryNorm, vec![d]),
        (form.qk_norm, ParamRole::KeyNorm, vec![d]),
        (true, ParamRole::Out, vec![h, q]),
        (biases.out, ParamRole::OutBias, vec![h]),
        (true, ParamRole::PostNorm, vec![h]),
        (layer_norm, ParamRole::PostNormBias, vec![h]),
        (gated, ParamRole::Gate, vec![ff, h]),
        (true, ParamRole::Up, vec![ff, h]),
        (gated && biases.mlp, ParamRole::GateBias, vec![ff]),
        (biases.mlp, ParamRole::UpBias, vec![ff]),
        (true, ParamRole::Down, vec![h, ff]),
        (biases.mlp, ParamRole::DownBias, vec![h]),
    ];
    let there = members.into_iter().filter(|(there, ..)| *there);
    there.map(|(_, member, shape)| (member, shape)).collect()
}

/// Initial value as in Hugging Face's models (`_init_weights` of the architecture).
fn start(config: &ModelConfig, member: ParamRole) -> InitialValue {
    match member {
        ParamRole::InputNorm
        | ParamRole::PostNorm
        | ParamRole::QueryNorm
        | ParamRole::KeyNorm
        | ParamRole::FinalNorm => InitialValue::Ones,
        ParamRole::InputNormBias
        | ParamRole::QueryBias
        | ParamRole::KeyBias
        | ParamRole::ValueBias
        | ParamRole::OutBias
        | ParamRole::PostNormBias
        | ParamRole::GateBias
        | ParamRole::UpBias
        | ParamRole::DownBias
        | ParamRole::FinalNormBias => InitialValue::Zeros,
        ParamRole::Out | ParamRole::Down if config.architecture.form().scaled_residual => {
            InitialValue::Normal {
                scale: 1.0 / (2.0 * config.layers as f64).sqrt(),
            }
        }
        _ => InitialValue::Normal { scale: 1.0 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(tied: bool) -> ModelConfig {
        ModelConfig {
            vocab_size: 101,
            hidden_size: 36,
            intermediate_size: 50,
            layers: 3,
            heads: 6,
            kv_heads: 2,
            head_dim: Some(10),
            rope_theta: 10000.0,
            norm_eps: 1e-6,
            tied,
            initializer_range: 0.02,
            max_position_embeddings: 128,
            ..ModelConfig::default()
        }
    }

    #[test]
    fn units_come_in_forward_order_with_hugging_face_names() {
        let units = unit_layouts(&config(false));
        let names: Vec<&str> = units.iter().map(|unit| unit.name.as_str()).collect();
        assert_eq!(
            names,
            ["embedding", "block.0", "block.1", "block.2", "head"]
        );
        let block: Vec<(&str, &[usize], bool)> = units[2]
            .params
            .iter()
            .map(|p| (p.name.as_str(), p.shape.as_slice(), p.decay))
            .collect();
        assert_eq!(
            block,
            [
                ("model.layers.1.input_layernorm.weight", &[36][..], false),
                (
                    "model.layers.1.self_attn.q_proj.weight",
                    &[60, 36][..],
                    true
                ),
                (
                    "model.layers.1.self_attn.k_proj.weight",
                    &[20, 36][..],
                    true
                ),
                (
                    "model.layers.1.self_attn.v_proj.weight",
                    &[20, 36][..],
                    true
                ),
                (
                    "model.layers.1.self_attn.o_proj.weight",
                    &[36, 60][..],
                    true
                ),
                (
                    "model.layers.1.post_attention_layernorm.weight",
                    &[36][..],
                    false
                ),
                ("model.layers.1.mlp.gate_proj.weight", &[50, 36][..], true),
                ("model.layers.1.mlp.up_proj.weight", &[50, 36][..], true),
                ("model.layers.1.mlp.down_proj.weight", &[36, 50][..], true),
            ]
        );
        let outer = |unit: &UnitLayout| {
            unit.params
                .iter()
                .map(|p| p.name.clone())
                .collect::<Vec<_>>()
        };
        assert_eq!(outer(&units[0]), ["model.embed_tokens.weight"]);
        assert_eq!(outer(&units[4]), ["model.norm.weight", "lm_head.weight"]);
        assert_eq!(
            outer(&unit_layouts(&config(true))[4]),
            ["model.norm.weight"]
        );
    }

    #[test]
    fn parameters_are_complete_aligned_and_do_not_overlap() {
        for tied in [false, true] {
            let config = config(tied);
            let units = unit_layouts(&config);
            for unit in &units {
                let mut end = 0;
                for param in &unit.params {
                    assert!(
                        param.offset_elems.is_multiple_of(ALIGN_ELEMS),
                        "{}",
                        param.name
                    );
                    assert!(param.offset_elems >= end, "{} overlaps", param.name);
                    assert!(
                        param.offset_elems - end < ALIGN_ELEMS,
                        "{} wastes space",
                        param.name
                    );
                    end = param.range_elems().end;
                }
                assert_eq!(unit.elems, end.next_multiple_of(ALIGN_ELEMS));
            }
            let count: usize = units
                .iter()
                .flat_map(|unit| &unit.params)
                .map(ParamLayout::elems)
                .sum();
            assert_eq!(count, config.params_count());
        }
        // Counted by hand: 2 x 101 x 36 outside, 36 + 3 x (36 x (60 + 20 + 20) + 60 x 36 + 3 x 36 x 50 + 2 x 36) inside.
        assert_eq!(
            config(false).params_count(),
            7272 + 36 + 3 * (3600 + 2160 + 5400 + 72)
        );
    }
}
