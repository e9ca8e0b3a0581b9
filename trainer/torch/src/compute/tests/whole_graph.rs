//! Compares block by block computation with one autograd graph over the whole model: the bits must be equal.

use kernels_torch::vjp;
use tch::{Reduction, Tensor};

use super::*;
use crate::compute::block::AutogradBlock;
use crate::compute::dropout::DropoutSite;
use crate::compute::linear::{at_least_fp32, linear, product_input};
use crate::compute::norm::{NormWeights, norm};
use crate::compute::params::Params;
use crate::compute::positions::Rotary;
use training_run::model::ParamRole;

/// Computes loss and flat gradients from one graph, without slices, sinks or recomputation.
fn whole_graph(case: &Case) -> (f64, Vec<Vec<u8>>) {
    let (engine, config) = (&case.engine, case.engine.config());
    let mut units: Vec<Params> = engine
        .units()
        .iter()
        .zip(&case.weights)
        .map(|(layout, weights)| Params::new(layout, weights, true).unwrap())
        .collect();
    let leaves: Vec<Tensor> = units
        .iter()
        .flat_map(|unit| unit.all().iter().map(Tensor::shallow_clone))
        .collect();
    let (_, seq_len) = case.inputs.shape();
    let masks = |unit| engine.masks(unit, case.inputs.batch().first_sample);
    // Looked up in fp32 and rounded: forward is exact, and the gradient is summed in fp32 as in the engine.
    let wide = |x: &Tensor| x.to_kind(at_least_fp32(case.kind));
    let (head, embedding) = (units.pop().unwrap(), units.remove(0));
    let table = embedding.get(ParamRole::Embedding);
    let mut x = Tensor::embedding(&wide(table), &case.inputs.ids, -1, false, false);
    x = x.to_kind(case.kind);
    let learned = embedding.find(ParamRole::Positions);
    if let Some(rows) = learned {
        let rows = wide(rows).narrow(0, 0, seq_len as i64).expand_as(&x);
        x += rows.to_kind(case.kind);
    }
    x = masks(0).apply(DropoutSite::Embedding, &x).unwrap();
    let rotated = learned.is_none();
    let rotary = rotated.then(|| Rotary::new(config, seq_len, case.kind).unwrap());
    for (layer, params) in units.into_iter().enumerate() {
        let block = AutogradBlock {
            config,
            rotary: rotary.as_ref().map(Rotary::shallow_clone),
            documents: None,
            params,
            window: config.window(layer),
            masks: masks(layer + 1),
            sequence: None,
        };
        x = block.forward(&x).unwrap();
    }
    let projection = if config.tied {
        table
    } else {
        head.get(ParamRole::Projection)
    };
    let rows = x.view([-1, config.hidden_size as i64]);
    let weights = NormWeights::new(&head, ParamRole::FinalNorm, ParamRole::FinalNormBias);
    let normed = norm(config, &rows, &weights).unwrap();
    let (normed, projection) = (
        product_input(&normed).unwrap(),
        product_input(projection).unwrap(),
    );
    let logits = linear(&normed, &projection, None, case.kind).unwrap();
    let targets = case.targets.ids.view([-1]);
    let wide = logits.to_kind(at_least_fp32(case.kind));
    let losses = wide.cross_entropy_loss(&targets, None::<Tensor>, Reduction::None, IGNORED, 0.0);
    let counted = case.targets.counted() as f64;
    let weights = losses.detach().full_like(1.0 / counted);
    let loss = f64::try_from(losses.detach().sum(Kind::Double)).unwrap() / counted;
    let inputs: Vec<&Tensor> = leaves.iter().collect();
    let mut grads = vjp(&[&losses], &[&weights], &inputs).unwrap().into_iter();
    let flat = engine
        .units()
        .iter()
        .map(|layout| {
            let mut sink = GradSink::on(tch::Device::Cpu, layout, case.kind);
            for param in 0..layout.params.len() {
                sink.add(param, grads.next().unwrap()).unwrap();
            }
            finished(&mut sink)
        })
        .collect();
    (loss, flat)
}

/// Model large enough for torch's vectorized and threaded code.
pub(super) fn larger(tied: bool) -> ModelConfig {
    ModelConfig {
        vocab_size: 300,
        hidden_size: 96,
        intermediate_size: 200,
        layers: 3,
        head_dim: None,
        initializer_range: 0.05,
        max_position_embeddings: 64,
        ..config(tied)
    }
}

pub(super) fn gives_the_bits_of_one_graph(case: &Case) {
    let kind = case.kind;
    let (loss, grads) = case.loss_and_grads(1.0);
    let (whole_loss, whole_grads) = whole_graph(case);
    assert_eq!(loss.to_bits(), whole_loss.to_bits(), "{kind:?}: the loss");
    for ((ours, whole), layout) in grads.iter().zip(&whole_grads).zip(case.engine.units()) {
        assert!(ours == whole, "{kind:?}: the gradients of {}", layout.name);
    }
}

#[test]
fn block_by_block_gives_the_bits_of_one_graph() {
    for kind in [Kind::Float, Kind::BFloat16] {
        for config in [config(false), larger(false)] {
            let seq_len = config.max_position_embeddings;
            gives_the_bits_of_one_graph(&Case::from_config(&config, kind, MICRO_BATCH, seq_len));
        }
    }
}

#[test]
fn a_tied_model_in_fp32_gives_the_bits_of_one_graph() {
    gives_the_bits_of_one_graph(&Case::from_config(
        &larger(true),
        Kind::Float,
        MICRO_BATCH,
        64,
    ));
}

#[test]
fn the_same_step_again_gives_the_same_bits() {
    for kind in [Kind::Float, Kind::BFloat16] {
        let first = Case::from_config(&larger(false), kind, MICRO_BATCH, 64);
        let (loss, grads) = first.loss_and_grads(1.0);
        // Allocations in between move every buffer; the first case still holds its own.
        let second = Case::from_config(&larger(false), kind, MICRO_BATCH, 64);
        let (again, grads_again) = second.loss_and_grads(1.0);
        assert_eq!(loss.to_bits(), again.to_bits());
        assert!(grads == grads_again, "{kind:?}");
    }
}
