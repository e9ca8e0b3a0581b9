//! Dropout over a whole step: a sample has the same mask wherever it is computed, and evaluation has none.

use super::forms::{SOME, forms};
use super::*;

/// Loss and gradients of `rows` samples from sample `first` of the four below.
fn of_rows(config: &ModelConfig, first: usize, rows: usize) -> Vec<f64> {
    let mut case = Case::from_config(config, Kind::Double, 1, SEQ_LEN).leaving_out(SOME);
    let all: Vec<i64> = (0..4 * SEQ_LEN as i64).map(|i| (i * i + 3) % 11).collect();
    let own = &all[first * SEQ_LEN..(first + rows) * SEQ_LEN];
    let inputs = Tokens::inputs(own, rows, SEQ_LEN, 11).unwrap();
    case.inputs = inputs.numbered(100 + first as u64);
    case.targets = Tokens::targets(own, rows, SEQ_LEN, 11).unwrap();
    let (loss, grads) = case.loss_and_grads(rows as f64 / 4.0);
    let grads = grads.iter().flat_map(|bytes| f64s(bytes));
    [loss * rows as f64 / 4.0]
        .into_iter()
        .chain(grads)
        .collect()
}

#[test]
fn other_micro_batches_drop_the_same_elements() {
    for (name, config) in forms(&config(false)) {
        let whole = of_rows(&config, 0, 4);
        for parts in [vec![(0, 2), (2, 2)], vec![(0, 1), (1, 3)]] {
            let parts = parts
                .into_iter()
                .map(|(first, rows)| of_rows(&config, first, rows));
            let sum: Vec<f64> = parts
                .reduce(|a, b| a.iter().zip(b).map(|(a, b)| a + b).collect())
                .unwrap();
            let apart = whole.iter().zip(&sum).map(|(a, b)| (a - b).abs());
            let largest = apart.fold(0.0, f64::max);
            assert!(largest < 1e-12, "{name}: {largest:.1e}");
        }
    }
}

#[test]
fn samples_without_a_number_have_no_dropout() {
    for (name, config) in forms(&config(false)) {
        let plain = Case::from_config(&config, Kind::Float, MICRO_BATCH, SEQ_LEN);
        let mut case =
            Case::from_config(&config, Kind::Float, MICRO_BATCH, SEQ_LEN).leaving_out(SOME);
        assert_ne!(case.loss(), plain.loss(), "{name}");
        let another = case.loss();
        case.inputs = case.inputs.numbered(6);
        assert_ne!(case.loss(), another, "{name}: each sample has its own mask");
        case.inputs = Case::from_config(&config, Kind::Float, MICRO_BATCH, SEQ_LEN).inputs;
        assert_eq!(case.loss().to_bits(), plain.loss().to_bits(), "{name}");
    }
}
