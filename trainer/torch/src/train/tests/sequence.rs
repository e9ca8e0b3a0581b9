//! Ranks that divide each sequence compute what one rank does with whole sequences: losses, gradient norms, an evaluation and the updated
//! parameters, within the rounding of sums in fp32.
//!
//! Errors that these tests find: a rank's tokens have the positions, targets or documents of other tokens; heads are exchanged in the wrong
//! order; heads of keys and values that several ranks share miss a part of their gradients; tokens that count are weighted by rank; groups
//! read the same samples; activations that are kept belong to another rank's tokens.

use super::*;

/// A way to divide a step of one rank among several.
struct Division {
    ranks: u32,
    sequence_ranks: u32,
    /// Names of forms of models that it is tested with; empty: all.
    models: &'static [&'static str],
}

/// Forms of models without dropout, which this refuses. There are more blocks than buffers.
fn divided_models() -> Vec<(&'static str, Value)> {
    let mut all = models();
    for key in ["embd_pdrop", "resid_pdrop", "attn_pdrop"] {
        all[0].1[key] = json!(0.0);
    }
    let (_, mut shared) = all[1].clone();
    shared["num_key_value_heads"] = json!(1);
    all.push(("llama with one key head", shared));
    all
}

/// Prompts with completions of many lengths: several documents in a sequence, and different numbers of tokens that count on each rank.
fn write_records(harness: &Harness) -> Value {
    let path = harness.dir.path().join("records.jsonl");
    let record = |number: u64| {
        let letters = |seed: u64, count: u64| -> String {
            let letter = |at: u64| (b'a' + (splitmix64(seed + at) % 26) as u8) as char;
            (0..count).map(letter).collect()
        };
        let (prompt, answer) = (1 + splitmix64(number) % 7, 1 + splitmix64(number + 999) % 4);
        json!({"prompt": letters(number << 8, prompt), "completion": letters(number << 9, answer)})
            .to_string()
    };
    let lines: Vec<String> = (0..400).map(record).collect();
    std::fs::write(&path, lines.join("\n")).unwrap();
    json!({"files": [path], "validation_fraction": 0.1})
}

/// Steps of `model` on `ranks`.
fn results(harness: &Harness, case: &Case, ranks: &Ranks, way: &Way) -> StepResults {
    let mut tree = harness.tree(&case.model, way);
    tree["data"] = case.data.clone();
    // Without a gradient, Adam would divide differences in rounding by themselves.
    tree["optimizer"]["params"]["eps"] = json!(1e-2);
    let sequence_ranks = ranks.sequence.as_ref().map_or(1, |ranks| ranks.ranks());
    tree["train"]["sequence_parallel"] = json!(sequence_ranks);
    let settings = check(tree, "a test", Some(ranks.comm.world().ranks)).unwrap();
    let data = harness.data(&settings);
    steps(&settings, &data, way, None, ranks, random)
}

struct Case {
    name: String,
    model: Value,
    data: Value,
}

fn assert_near_losses(found: &StepResults, expected: &StepResults, most: f64, what: &str) {
    let numbers = |results: &StepResults| -> Vec<f64> {
        let steps = results.steps.iter().flatten();
        steps.chain(&results.evaluated).copied().collect()
    };
    for (found, expected) in numbers(found).iter().zip(numbers(expected)) {
        let off = (found / expected - 1.0).abs();
        assert!(off < most, "{what}: {found}, not {expected}");
    }
}

fn assert_near(found: &StepResults, expected: &StepResults, what: &str) {
    assert_near_losses(found, expected, 1e-6, what);
    let values = |bytes: &[u8]| -> Vec<f32> {
        let each = bytes.chunks_exact(4);
        each.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
            .collect()
    };
    for (place, bytes) in &found.params {
        let pairs = values(bytes)
            .into_iter()
            .zip(values(&expected.params[place]));
        let most = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(most < 1e-6, "{what}, {place:?}: {most:e} apart");
    }
}

/// What a case is computed with.
struct Ways<'a> {
    bf16: bool,
    tiles: usize,
    /// Settings of activation checkpointing, which must give the same bits as recomputing everything.
    keeps: &'a [Checkpointing],
}

/// Compares this rank with one rank that does all of a step in more micro-batches.
fn compare_ways(harness: &Harness, case: &Case, ranks: &Ranks, ways: &Ways) {
    let sequence_ranks = ranks.sequence.as_ref().map_or(1, |ranks| ranks.ranks());
    let groups = ranks.comm.world().ranks as usize / sequence_ranks;
    let way = |keep, micro_batches: usize, group| Way {
        muon: false,
        bf16: ways.bf16,
        keep,
        tiles: ways.tiles,
        micro_batches: micro_batches as u64,
        group,
        place: Place::Shared,
    };
    let (full, all) = (Checkpointing::default(), groups * GROUPED);
    let expected = results(harness, case, &Ranks::alone(), &way(full, all, all));
    let found = |keep, group| {
        let way = way(keep, GROUPED, group);
        let found = results(harness, case, ranks, &way);
        let what = format!("{}, {way:?}", case.name);
        match ways.bf16 {
            true => assert_near_losses(&found, &expected, 1e-2, &what),
            false => assert_near(&found, &expected, &what),
        }
        found.bits()
    };
    let first = found(full, GROUPED);
    for &keep in ways.keeps {
        // The last group is smaller.
        assert_eq!(found(keep, 2), first, "{}, {keep:?}", case.name);
    }
}

/// Compares one of `ranks` with one rank that does all of a step, for every form of model, with text and with documents.
fn compare(rank: u32, division: &Division) {
    let ranks = Ranks::connect(rank, division.ranks, division.sequence_ranks);
    let harness = Harness::new();
    let text = json!({"files": [harness.dir.path().join("text")], "validation_fraction": 0.1});
    let records = write_records(&harness);
    for (name, model) in divided_models() {
        if !(division.models.is_empty() || division.models.contains(&name)) {
            continue;
        }
        let compare = |what: &str, data: &Value, bf16, tiles, keeps: &[_]| {
            let case = Case {
                name: format!("{name}, {what}"),
                model: model.clone(),
                data: data.clone(),
            };
            let ways = Ways { bf16, tiles, keeps };
            compare_ways(&harness, &case, &ranks, &ways);
        };
        compare("text", &text, false, 1, &[]);
        compare("records", &records, false, 1, keeps(1));
        // In other models, attention beside an MLP in chunks is one of these two, and numbers in 16 bits take the same way.
        if ["gpt2", "qwen3"].contains(&name) {
            compare("records", &records, false, 3, keeps(3));
            compare("text", &text, true, 1, &keeps(1)[..1]);
        }
    }
}

#[test]
fn two_ranks_of_one_sequence_compute_what_one_rank_does() {
    let name = "sequence::two_ranks_of_one_sequence_compute_what_one_rank_does";
    let division = Division {
        ranks: 2,
        sequence_ranks: 2,
        models: &[],
    };
    match test_rank() {
        Some(rank) => compare(rank, &division),
        None => as_ranks(name, division.ranks),
    }
}

#[test]
fn two_groups_of_two_ranks_compute_what_one_rank_does() {
    let name = "sequence::two_groups_of_two_ranks_compute_what_one_rank_does";
    let division = Division {
        ranks: 4,
        sequence_ranks: 2,
        models: &["qwen3"],
    };
    match test_rank() {
        Some(rank) => compare(rank, &division),
        None => as_ranks(name, division.ranks),
    }
}
