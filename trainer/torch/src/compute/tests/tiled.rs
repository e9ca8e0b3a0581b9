//! An MLP in chunks equals the whole MLP, except for the order of sums.
//!
//! Errors that these tests find: a chunk is left out or used twice, a bias is added with every chunk, a
//! column of the last product is taken for a row, dropout differs, gradients of chunks are joined in the
//! wrong order.

use tch::Kind;

use super::forms::{SOME, forms};
use super::gradients::gradients_are_slopes;
use super::{Case, MICRO_BATCH, SEQ_LEN, config, f64s};
use training_run::model::ModelConfig;

impl Case {
    fn in_tiles(mut self, tiles: usize) -> Self {
        self.engine = self.engine.in_tiles(tiles);
        self
    }
}

#[test]
fn gradients_with_an_mlp_in_chunks_are_slopes() {
    let base = ModelConfig {
        layers: 1,
        ..config(false)
    };
    for (name, config) in forms(&base) {
        println!("{name}");
        let case = Case::from_config(&config, Kind::Double, MICRO_BATCH, SEQ_LEN);
        // 12 elements in 5 chunks: some of two, some of three.
        gradients_are_slopes(case.leaving_out(SOME).in_tiles(5));
    }
}

#[test]
fn chunks_give_the_loss_and_gradients_of_the_whole_mlp() {
    for (name, config) in forms(&config(true)) {
        let case =
            || Case::from_config(&config, Kind::Double, MICRO_BATCH, SEQ_LEN).leaving_out(SOME);
        let (loss, grads) = case().loss_and_grads(0.5);
        for tiles in [2, 3, 12] {
            let (tiled_loss, tiled_grads) = case().in_tiles(tiles).loss_and_grads(0.5);
            assert!(
                (loss - tiled_loss).abs() < 1e-12,
                "{name}: {loss}, {tiled_loss}"
            );
            for (grads, tiled) in grads.iter().zip(&tiled_grads) {
                for (grad, tiled) in f64s(grads).iter().zip(f64s(tiled)) {
                    assert!(
                        (grad - tiled).abs() < 1e-11,
                        "{name} in {tiles}: {grad}, {tiled}"
                    );
                }
            }
        }
    }
}

#[test]
fn one_chunk_is_the_whole_mlp_bit_for_bit() {
    let case = || Case::from_config(&config(false), Kind::Float, MICRO_BATCH, SEQ_LEN);
    assert_eq!(
        case().loss_and_grads(1.0),
        case().in_tiles(1).loss_and_grads(1.0)
    );
    assert_eq!(case().loss(), case().in_tiles(1).loss());
}
