//! Documents in one sequence are computed as if each were alone: loss, and every gradient.

use super::forms::forms;
use super::*;

/// Lengths of the documents of each sequence.
const LENGTHS: [&[usize]; 2] = [&[3, 1, 4, 2], &[5, 5]];
const ALL: usize = 10;

/// One micro-batch of `lengths`, whose tokens are those from number `first` on. The last token of a document
/// has no target, since the next one is not its continuation.
fn packed(case: &mut Case, lengths: &[&[usize]], first: usize) {
    let vocab_size = case.engine.config().vocab_size;
    let id = |at: usize| ((at * at + 3 * at + at / 7) % vocab_size) as i64;
    let (mut ids, mut targets, mut starts) = (Vec::new(), Vec::new(), Vec::new());
    for length in lengths.iter().copied().flatten() {
        starts.push(ids.len());
        for token in 0..*length {
            let at = first + ids.len();
            ids.push(id(at));
            targets.push(if token + 1 == *length {
                IGNORED
            } else {
                id(at + 1)
            });
        }
    }
    let (rows, seq_len) = (lengths.len(), ids.len() / lengths.len());
    let inputs = Tokens::inputs(&ids, rows, seq_len, vocab_size).unwrap();
    let inputs = inputs.in_documents(&starts).unwrap();
    case.inputs = match case.inputs.batch().first_sample {
        Some(first) => inputs.numbered(first),
        None => inputs,
    };
    case.targets = Tokens::targets(&targets, rows, seq_len, vocab_size).unwrap();
}

fn gives_the_results_of_each_document_alone(make: impl Fn() -> Case, what: &str) {
    let mut case = make();
    packed(&mut case, &LENGTHS, 0);
    let counted = case.targets.counted() as f64;
    let (loss, grads) = case.loss_and_grads(1.0);
    assert_eq!(loss, case.loss(), "{what}: evaluation has the same loss");
    let mut sum_loss = 0.0;
    let mut sums: Vec<Vec<f64>> = grads.iter().map(|unit| vec![0.0; unit.len() / 8]).collect();
    let mut first = 0;
    for length in LENGTHS.iter().copied().flatten() {
        let mut alone = make();
        packed(&mut alone, &[&[*length]], first);
        first += length;
        let share = alone.targets.counted() as f64 / counted;
        let (loss, grads) = alone.loss_and_grads(share);
        sum_loss += share * loss;
        for (sum, grads) in sums.iter_mut().zip(&grads) {
            sum.iter_mut()
                .zip(f64s(grads))
                .for_each(|(sum, grad)| *sum += grad);
        }
    }
    assert!(
        (loss / sum_loss - 1.0).abs() < 1e-13,
        "{what}: {loss}, {sum_loss}"
    );
    for ((unit, sums), layout) in grads.iter().zip(&sums).zip(case.engine.units()) {
        for (packed, sum) in f64s(unit).iter().zip(sums) {
            assert!(
                (packed - sum).abs() < 1e-12,
                "{what}, {}: {packed}, {sum}",
                layout.name
            );
        }
    }
}

#[test]
fn a_document_is_computed_as_if_it_were_alone() {
    // Rates so small that nothing is dropped, but the computation with all weights at once is used.
    let weighed = Dropout {
        attention: 1e-9,
        ..Dropout::NONE
    };
    let base = config(false);
    for (name, config) in forms(&base).into_iter().chain([("llama", base.clone())]) {
        let of = || Case::from_config(&config, Kind::Double, LENGTHS.len(), ALL);
        gives_the_results_of_each_document_alone(of, name);
        gives_the_results_of_each_document_alone(|| of().leaving_out(weighed), name);
        gives_the_results_of_each_document_alone(|| of().written_out(), name);
        let in_chunks = || {
            let mut case = of();
            case.engine = case.engine.in_tiles(3);
            case
        };
        gives_the_results_of_each_document_alone(in_chunks, name);
    }
}

/// A sequence of one document takes the same way as one without documents.
#[test]
fn documents_that_fill_their_sequences_change_no_bit() {
    let case = Case::new(false, Kind::Float);
    let mut whole = Case::new(false, Kind::Float);
    whole.inputs = whole.inputs.in_documents(&[0, SEQ_LEN]).unwrap();
    assert!(whole.inputs.batch().documents.is_none());
    assert!(case.loss_and_grads(1.0) == whole.loss_and_grads(1.0));
}
