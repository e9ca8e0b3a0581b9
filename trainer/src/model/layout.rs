//! Where each parameter lies in its unit's flat buffer. A layout is a function of the configuration alone; it is
//! stored with a job's record, so a change of it is a change of format.

use serde::{Deserialize, Serialize};

use super::ModelConfig;

/// Each parameter starts at a multiple of this many elements, and each unit's length is one: 128 bytes in 16 bit, so
/// that vector loads and tensors over the buffer are aligned whatever lies before.
pub const ALIGN_ELEMS: usize = 64;

/// One parameter inside its unit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParamLayout {
    /// Hugging Face's name, as in a checkpoint.
    pub name: String,
    /// Sizes, outermost first; a matrix is [outputs, inputs].
    pub shape: Vec<usize>,
    /// Where it starts in the unit's flat buffer.
    pub offset_elems: usize,
    /// Whether weight decay applies. False for norms, which alone start as ones.
    pub decay: bool,
}

impl ParamLayout {
    /// Elements of the parameter.
    pub fn elems(&self) -> usize {
        self.shape.iter().product()
    }

    /// The elements it takes of the unit's flat buffer.
    pub fn range_elems(&self) -> std::ops::Range<usize> {
        self.offset_elems..self.offset_elems + self.elems()
    }
}

/// One unit: parameters that are gathered together, in one flat buffer. The elements between parameters are padding:
/// zero in weights and in gradients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnitLayout {
    /// `embedding`, `block.N`, `head`.
    pub name: String,
    /// In the order they lie.
    pub params: Vec<ParamLayout>,
    /// Length of the flat buffer, padding included.
    pub elems: usize,
}

impl UnitLayout {
    fn new(name: impl Into<String>, params: Vec<(String, Vec<usize>, bool)>) -> Self {
        let mut end = 0usize;
        let params = params
            .into_iter()
            .map(|(name, shape, decay)| {
                let param = ParamLayout {
                    name,
                    shape,
                    offset_elems: end,
                    decay,
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

    /// Elements of all parameters, padding left out.
    pub fn params_elems(&self) -> usize {
        self.params.iter().map(ParamLayout::elems).sum()
    }
}

/// The model's units in the order forward uses them: embedding, blocks, head.
pub fn unit_layouts(config: &ModelConfig) -> Vec<UnitLayout> {
    let (h, ff, vocab) = (
        config.hidden_size,
        config.intermediate_size,
        config.vocab_size,
    );
    let (q, kv) = (
        config.heads * config.head_dim(),
        config.kv_heads * config.head_dim(),
    );
    let mut units = vec![UnitLayout::new(
        "embedding",
        vec![("model.embed_tokens.weight".into(), vec![vocab, h], true)],
    )];
    for layer in 0..config.layers {
        let param = |name: &str, shape: Vec<usize>| {
            let decay = shape.len() > 1;
            (format!("model.layers.{layer}.{name}.weight"), shape, decay)
        };
        units.push(UnitLayout::new(
            format!("block.{layer}"),
            vec![
                param("input_layernorm", vec![h]),
                param("self_attn.q_proj", vec![q, h]),
                param("self_attn.k_proj", vec![kv, h]),
                param("self_attn.v_proj", vec![kv, h]),
                param("self_attn.o_proj", vec![h, q]),
                param("post_attention_layernorm", vec![h]),
                param("mlp.gate_proj", vec![ff, h]),
                param("mlp.up_proj", vec![ff, h]),
                param("mlp.down_proj", vec![h, ff]),
            ],
        ));
    }
    let mut head = vec![("model.norm.weight".into(), vec![h], false)];
    if !config.tied {
        head.push(("lm_head.weight".into(), vec![vocab, h], true));
    }
    units.push(UnitLayout::new("head", head));
    units
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
            rms_norm_eps: 1e-6,
            tied,
            initializer_range: 0.02,
            max_position_embeddings: 128,
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
    fn parameters_are_aligned_and_do_not_overlap_and_are_all_there() {
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
                        "{} wastes room",
                        param.name
                    );
                    end = param.range_elems().end;
                }
                assert_eq!(unit.elems, end.next_multiple_of(ALIGN_ELEMS));
            }
            let count: usize = units.iter().map(UnitLayout::params_elems).sum();
            assert_eq!(count, config.params_count());
        }
        // Counted by hand: 2 x 101 x 36 outside, 36 + 3 x (36 x (60 + 20 + 20) + 60 x 36 + 3 x 36 x 50 + 2 x 36) inside.
        assert_eq!(
            config(false).params_count(),
            7272 + 36 + 3 * (3600 + 2160 + 5400 + 72)
        );
    }
}
