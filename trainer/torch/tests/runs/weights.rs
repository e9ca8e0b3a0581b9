//! Runs that start with the weights in a model's directory, with their state in various places; incomplete
//! weights are refused.
//!
//! Errors that these tests find: weights are read into the wrong tile when units are divided into tiles or
//! among ranks; a damaged file is detected only after the run was partly created; a resumed run needs a
//! directory that is gone, or silently uses other weights.

use crate::harness::{Harness, succeed};
use crate::model_dir::{ALL, FILE, copy, export, fixture, moving_run, numbers, still_run, tensors};

/// Places for the state, with numbers of ranks that share it.
fn state_places(harness: &Harness) -> Vec<(Vec<String>, u32)> {
    let on = |device: &str| {
        ["param", "optimizer"]
            .iter()
            .map(|what| format!("zero_optimization.offload_{what}.device={device}"))
            .collect::<Vec<_>>()
    };
    vec![
        (on("none"), 1),
        (harness.nvme(), 2),
        (on("cpu"), 1),
        (harness.nvme(), 1),
        (on("cpu"), 3),
    ]
}

#[test]
fn imported_weights_are_exported_bit_for_bit_from_any_place() {
    let harness = Harness::new();
    let places = state_places(&harness);
    for (number, model) in ALL.iter().enumerate() {
        let (sets, ranks) = &places[number % places.len()];
        let dir = fixture(model);
        let run = still_run(&harness, model, &dir).with(sets);
        let said = match ranks {
            1 => run.train(),
            ranks => succeed(run.launch(*ranks)),
        };
        let started = format!("started with the weights in {}", dir.display());
        assert!(said.contains(&started), "{model}: {said}");
        let out = harness.path(&format!("out-{model}"));
        export(&run, &out, &[]);
        assert!(tensors(&dir) == tensors(&out), "{model}: tensors differ");
        let config = |dir: &std::path::Path| {
            let text = std::fs::read_to_string(dir.join("config.json")).unwrap();
            serde_json::from_str::<serde_json::Value>(&text).unwrap()
        };
        assert_eq!(config(&dir), config(&out), "{model}");
    }
}

#[test]
fn sixteen_bit_runs_keep_the_whole_master() {
    let harness = Harness::new();
    let dir = fixture("gpt2");
    let run = still_run(&harness, "run", &dir).with(&["bf16.enabled=true"]);
    run.train();
    let (whole, half) = (harness.path("whole"), harness.path("half"));
    export(&run, &whole, &["--dtype", "fp32"]);
    export(&run, &half, &[]);
    let (whole, half) = (tensors(&whole), tensors(&half));
    assert!(tensors(&dir) == whole, "the masters equal the weights");
    for (name, tensor) in &whole {
        let bytes: Vec<u8> = numbers(tensor)
            .iter()
            .flat_map(|number| kernels::number::split(*number).0.to_le_bytes())
            .collect();
        let (dtype, shape, found) = &half[name];
        assert_eq!((*dtype, shape), (safetensors::Dtype::BF16, &tensor.1));
        assert_eq!(*found, bytes, "{name}");
    }
}

#[test]
fn a_run_in_fp16_is_exported_like_any_other() {
    let harness = Harness::new();
    let dir = fixture("llama");
    let run = still_run(&harness, "run", &dir).with(&["fp16.enabled=true"]);
    run.train();
    let (whole, half) = (harness.path("whole"), harness.path("half"));
    export(&run, &whole, &["--dtype", "fp32"]);
    export(&run, &half, &[]);
    assert!(
        tensors(&dir) == tensors(&whole),
        "the masters equal the weights"
    );
    let half = tensors(&half);
    assert!(
        half.values()
            .all(|(dtype, ..)| *dtype == safetensors::Dtype::F16)
    );
}

#[test]
fn a_directory_of_several_files_is_the_same_model() {
    let harness = Harness::new();
    let first = moving_run(&harness, "first", &fixture("qwen2")).with(&["train.stop_after=1"]);
    first.train();
    let (one, several) = (harness.path("one"), harness.path("several"));
    export(&first, &one, &[]);
    let said = export(&first, &several, &["--shard-size", "8KB"]);
    assert!(said.starts_with("exported step 1 of "), "{said}");
    let files = std::fs::read_dir(&several).unwrap().count();
    assert!(files >= 5, "{files} files");
    assert!(!several.join(FILE).exists());
    assert!(tensors(&one) == tensors(&several));
    let fingerprints = [&one, &several].map(|dir| {
        let name = dir.file_name().unwrap().to_str().unwrap().to_owned() + "-run";
        let run = moving_run(&harness, &name, dir);
        run.train();
        run.fingerprint()
    });
    assert_eq!(fingerprints[0], fingerprints[1]);
}

#[test]
fn incomplete_weights_are_refused_before_anything_is_created() {
    let harness = Harness::new();
    let dir = copy(&harness, "llama", "model");
    let whole = std::fs::read(dir.join(FILE)).unwrap();
    let run = moving_run(&harness, "run", &dir).with(&harness.nvme());
    let mut other = whole.clone();
    let at = |part: &str| {
        let mut windows = whole.windows(part.len());
        windows
            .position(|window| window == part.as_bytes())
            .unwrap()
    };
    other[at("[8,16]") + 1] = b'9';
    for (content, part) in [
        (
            &whole[..whole.len() - 4],
            "is truncated: its header describes",
        ),
        (&other[..], "does not have the size of bytes"),
        (b"not safetensors at all", "its header has "),
    ] {
        std::fs::write(dir.join(FILE), content).unwrap();
        let text = run.refused();
        assert!(text.contains(part) && text.contains(FILE), "{part}: {text}");
        assert!(!run.dir.exists(), "the run directory was created");
        assert!(harness.store_files().is_empty(), "a store was created");
    }
    // A value that is not finite, and a missing file.
    let mut broken = whole.clone();
    let data_start = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    broken[data_start..data_start + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(dir.join(FILE), &broken).unwrap();
    let text = run.refused();
    assert!(text.contains("element 0 is NaN"), "{text}");
    assert!(!run.dir.exists(), "the run directory was created");
    assert!(harness.store_files().is_empty(), "a store was created");
    std::fs::remove_file(dir.join(FILE)).unwrap();
    let mut from = harness
        .run("from", &["model={}", "scheduler={}"])
        .command("train");
    from.arg("--from").arg(&dir);
    for text in [run.refused(), crate::harness::fail(from)] {
        assert!(
            text.contains("no weights in ") && text.contains("model.init = \"random\""),
            "{text}"
        );
    }
    assert!(!run.dir.exists(), "the run directory was created");
    std::fs::write(dir.join(FILE), &whole).unwrap();
    let text = run.with(&["model.num_hidden_layers=3"]).refused();
    assert!(text.contains("have no tensor model.layers.2."), "{text}");
}

#[test]
fn a_resumed_run_does_not_need_the_model_directory() {
    let harness = Harness::new();
    let dir = copy(&harness, "mistral", "model");
    let run = moving_run(&harness, "run", &dir).with(&harness.nvme());
    let again = || moving_run(&harness, "run", &dir).with(&harness.nvme());
    let broken = moving_run(&harness, "broken", &dir).with(&["train.steps=2"]);
    broken.train();
    run.with(&["train.stop_after=1"]).train();
    let named = "it did not start with those in";
    assert!(
        !again()
            .with(&["train.stop_after=1"])
            .train()
            .contains(named)
    );
    // Other weights, then damaged ones, then none.
    let mut bytes = std::fs::read(dir.join(FILE)).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(dir.join(FILE), &bytes).unwrap();
    let said = again().with(&["train.stop_after=1"]).train();
    assert!(said.contains(named), "{said}");
    std::fs::write(dir.join(FILE), &bytes[..last]).unwrap();
    again().with(&["train.stop_after=1"]).train();
    std::fs::remove_file(dir.join(FILE)).unwrap();
    again().train();
    let state = |fingerprint: String| {
        fingerprint
            .lines()
            .skip(1)
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    assert_eq!(state(again().fingerprint()), state(broken.fingerprint()));
    // The model's files went with the run.
    let out = harness.path("out");
    export(&again(), &out, &[]);
    assert!(out.join("config.json").exists());
}

#[test]
fn random_weights_are_used_if_configured() {
    let harness = Harness::new();
    let dir = fixture("llama");
    let run = |name, sets: &[&str]| {
        let run = still_run(&harness, name, &dir).with(sets);
        let said = run.train();
        (run.fingerprint(), said)
    };
    let (with, _) = run("with", &[]);
    let (without, said) = run("without", &["model.init=random"]);
    assert!(said.contains("started with random weights"), "{said}");
    assert_ne!(with, without);
}

#[test]
fn all_parameters_decay_if_configured() {
    let harness = Harness::new();
    let (lr, decay) = (0.01f32, 0.5f32);
    let after = |name: &str, sets: &[&str]| {
        let run = moving_run(&harness, name, &fixture("gpt2"))
            .with(&["train.stop_after=1", "optimizer.params.lr=0.01"])
            .with(&["optimizer.params.weight_decay=0.5"])
            .with(sets);
        run.train();
        let out = harness.path(&format!("out-{name}"));
        export(&run, &out, &[]);
        tensors(&out)
    };
    let first = tensors(&fixture("gpt2"));
    let matrices = after("matrices", &[]);
    let all = after("all", &["optimizer.params.decay=all"]);
    let but = after("but", &["optimizer.params.no_decay=[\"bias\", \"ln_\"]"]);
    assert!(matrices == but, "GPT-2's biases and norms have these names");
    for (name, start) in &first {
        let (start, kept, decayed) = (
            numbers(start),
            numbers(&matrices[name]),
            numbers(&all[name]),
        );
        // The same step, with AdamW's decay: lr * decay of the weight before.
        let vector = first[name].1.len() == 1;
        for elem in 0..start.len() {
            let taken = if vector {
                lr * decay * start[elem]
            } else {
                0.0
            };
            let off = (kept[elem] - taken - decayed[elem]).abs();
            assert!(
                off <= 1e-6,
                "{name}[{elem}]: {} and {}",
                kept[elem],
                decayed[elem]
            );
        }
        assert_eq!(vector, kept != decayed, "{name}");
    }
}

#[test]
fn a_group_of_parameters_has_its_own_learning_rate_and_weight_decay() {
    let harness = Harness::new();
    let after = |name: &str, groups: &str| {
        let run = moving_run(&harness, name, &fixture("gpt2"))
            .with(&["train.stop_after=1", "optimizer.params.lr=0.01"])
            .with(&["optimizer.params.weight_decay=0.5"])
            .with(&[format!("optimizer.groups={groups}")]);
        run.train();
        let out = harness.path(&format!("out-{name}"));
        export(&run, &out, &[]);
        tensors(&out)
    };
    let first = tensors(&fixture("gpt2"));
    let same = after("same", "[]");
    // The first group that fits counts: the second one has the attention's biases only.
    let own = after(
        "own",
        "[{ params = [\"wte\", \"c_attn.weight\"], lr = 0.0 }, { params = [\"c_attn\"], lr = 0.005, weight_decay = 1.0 }]",
    );
    for (name, start) in &first {
        let moved = own[name] != same[name];
        if name.contains("wte") || name.contains("c_attn.weight") {
            assert!(own[name] == *start, "{name} has a rate of 0");
        } else if name.contains("c_attn") {
            let [start, all, own] = [start, &same[name], &own[name]].map(numbers);
            for ((start, all), own) in start.iter().zip(all).zip(own) {
                // Half of the step, without decay in both; then 0.005 * 1.0 of the weight.
                let expected = start - 0.5 * (start - all) - 0.005 * start;
                assert!(
                    (own - expected).abs() < 1e-6,
                    "{name}: {own} and {expected}"
                );
            }
        } else {
            assert!(!moved, "{name} is in no group");
        }
    }
}

#[test]
fn another_runs_weights_start_a_new_run() {
    let harness = Harness::new();
    let first = moving_run(&harness, "first", &fixture("qwen3")).with(&harness.nvme());
    first.train();
    let expected = harness.path("first-out");
    export(&first, &expected, &[]);
    let from = |name: &str| {
        let set = format!("model={{from = \"{}\"}}", first.dir.display());
        let sets = ["train.steps=2", "scheduler={}", "optimizer.params.lr=0.0"];
        harness
            .run(name, &sets)
            .with(&[&set])
            .with(&["optimizer.params.weight_decay=0.0"])
    };
    // With another tile size, another place and other ranks.
    let second = from("second").with(&["offload.tile_elems=8192"]);
    let said = succeed(second.launch(2));
    let started = format!(
        "started with the weights of step 2 of {}",
        first.dir.display()
    );
    assert!(said.contains(&started), "{said}");
    let out = harness.path("second-out");
    export(&second, &out, &[]);
    assert!(tensors(&expected) == tensors(&out));
    assert!(!second.dir.join("first-weights").exists());
    assert_eq!(second.metrics().len(), 2);
    // With the command line option, and a model directory in place of a run.
    let third = harness.run("third", &["model={}", "train.steps=1", "scheduler={}"]);
    let mut command = third.command("train");
    command.arg("--from").arg(&out);
    let said = succeed(command);
    assert!(
        said.contains(&format!("started with the weights in {}", out.display())),
        "{said}"
    );
    // Another model, this run itself, and a missing directory.
    let text = from("other").with(&["model.num_hidden_layers=3"]).refused();
    assert!(
        text.contains("model.from: the run in ") || text.contains("is missing"),
        "{text}"
    );
    let path = format!("model.path={}", fixture("qwen2").display());
    let text = from("other").with(&[path]).refused();
    assert!(
        text.contains("has another model: model_type is qwen3 there and qwen2 here"),
        "{text}"
    );
    let own = format!("train.run_dir={}", first.dir.display());
    let mut command = from("own").with(&[own]).command("train");
    command.arg("--fresh");
    let text = crate::harness::fail(command);
    assert!(text.contains("is this run's own directory"), "{text}");
    assert!(first.fingerprint().starts_with("step 2"));
    let text = from("none").with(&["model.from=/nowhere"]).refused();
    assert!(text.contains("/nowhere does not exist"), "{text}");
    let path = format!("model.path={}", fixture("qwen2").display());
    let nowhere = from("none").with(&["model.from=/nowhere"]).with(&[path]);
    let text = nowhere.refused();
    assert!(text.contains("/nowhere does not exist"), "{text}");
}

/// Converts weights to another type without steps and data.
#[test]
fn a_run_without_steps_converts_its_initial_weights() {
    let harness = Harness::new();
    let dir = fixture("qwen2");
    for (number, (sets, ranks)) in state_places(&harness).iter().enumerate().take(2) {
        let name = format!("run{number}");
        let path = format!("model={{path = \"{}\"}}", dir.display());
        let run = harness.run(&name, &["train.steps=0", "scheduler={}", "data={}", &path]);
        let run = run.with(sets);
        let said = match ranks {
            1 => run.train(),
            ranks => succeed(run.launch(*ranks)),
        };
        assert!(said.contains("done: at step 0 of 0, "), "{said}");
        let (whole, half) = (
            harness.path(&format!("{name}-out")),
            harness.path(&format!("{name}-half")),
        );
        let said = export(&run, &whole, &[]);
        assert!(said.starts_with("exported step 0 of "), "{said}");
        assert!(tensors(&dir) == tensors(&whole), "{sets:?}");
        export(&run, &half, &["--dtype", "bf16"]);
        assert!(
            tensors(&half)
                .values()
                .all(|tensor| tensor.0 == safetensors::Dtype::BF16)
        );
        // A second start resumes; with steps and data it continues from there.
        assert!(run.train().contains("resumed at step 0"));
        let text = format!("data={{files = [\"{}\"]}}", harness.path("text").display());
        let more = run.with(&["train.steps=1".to_owned(), text]);
        let said = match ranks {
            1 => more.train(),
            ranks => succeed(more.launch(*ranks)),
        };
        assert!(
            said.contains("resumed at step 0") && !said.contains("was the default"),
            "{said}"
        );
        assert_eq!(more.metrics().len(), 1);
    }
}
