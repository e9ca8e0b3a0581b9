//! Optimizers, their state and their groups of parameters.

use super::*;

#[test]
fn parameter_groups_are_checked_against_the_models_names() {
    let with = |groups: Value| run_with(&[("optimizer.groups", groups)]);
    let wrong = |groups: Value| refused(&[("optimizer.groups", groups)]);
    let own = json!({"params": ["embed"], "lr": 1e-6, "weight_decay": 0.0});
    let layer = json!({"params": ["layers.0."], "lr": 5e-4});
    let run = with(json!([own, layer])).unwrap();
    let names = [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
    ];
    let rates = names.map(|name| run.optimizer.group_of(name).unwrap().lr.unwrap());
    assert_eq!(rates, [1e-6, 5e-4]);
    assert!(
        run.optimizer
            .group_of("model.layers.10.mlp.up_proj.weight")
            .is_none()
    );
    let summary = &run.summary()[0];
    let words = "; embed: lr 1e-6, weight decay 0; layers.0.: lr 5e-4";
    assert!(summary.ends_with(words), "{summary}");
    let text = wrong(json!([{"params": ["wte"], "lr": 1e-6}]));
    assert!(
        text.contains(
            "optimizer.groups: no parameter's name contains \"wte\"; names are like model.layers.0."
        ),
        "{text}"
    );
    let text = wrong(json!([{"params": ["layers"], "lr": 1e-6}, layer]));
    assert!(
        text.contains("every parameter of \"layers.0.\" is in an earlier group"),
        "{text}"
    );
    for (group, words) in [
        (
            json!({"params": ["embed"]}),
            "sets neither lr nor weight_decay",
        ),
        (
            json!({"params": ["embed"], "lr": -1.0}),
            "lr of \"embed\": -1: must not be negative",
        ),
        (json!({"params": [], "lr": 1e-6}), "params must be texts"),
        (
            json!({"params": ["embed"], "betas": [0.9, 0.99]}),
            "expected a list of tables with params, lr and weight_decay",
        ),
    ] {
        let text = wrong(json!([group]));
        assert!(text.contains(words), "{group}: {text}");
    }
    let still = ("optimizer.params.lr", json!(0.0));
    let groups = ("optimizer.groups", json!([layer]));
    let text = refused(&[still, groups]);
    assert!(text.contains("needs optimizer.params.lr above 0"), "{text}");
}

#[test]
fn moments_in_fewer_bits_are_shown_and_named_instead_of_an_optimizer() {
    for (word, moments, shown) in [
        ("bf16", MomentsType::Bf16, ", moments in bf16"),
        ("8bit", MomentsType::EightBit, ", moments in 8 bits"),
    ] {
        let run = run_with(&[("optimizer.moments", json!(word))]).unwrap();
        assert_eq!(run.optimizer.moments, moments);
        assert!(run.summary()[0].ends_with(shown));
    }
    let text = refused(&[("optimizer.type", json!("AdamW8bit"))]);
    assert!(text.contains("optimizer.moments = \"8bit\""), "{text}");
}

#[test]
fn masters_in_bf16_are_shown_and_belong_to_bf16_runs() {
    let master = ("optimizer.master", json!("bf16"));
    let run = run_with(&[master.clone(), ("bf16.enabled", json!(true))]).unwrap();
    assert_eq!(run.optimizer.master, MasterType::Bf16);
    assert!(run.summary()[0].ends_with(", masters in bf16"));
    for (precision, name) in [
        ("fp16.enabled", "fp16"),
        ("bf16.check_grad_overflow", "fp32"),
    ] {
        let text = refused(&[master.clone(), (precision, json!(true))]);
        let part = format!("this run's are {name}: set bf16.enabled = true");
        assert!(
            text.contains("optimizer.master") && text.contains(&part),
            "{text}"
        );
    }
    // DeepSpeed's names of both.
    let switches = [
        ("bf16.enabled", json!(true)),
        ("bf16.bf16_master_weights_and_grads", json!(true)),
        ("bf16.bf16_optimizer_states", json!(true)),
    ];
    let optimizer = run_with(&switches).unwrap().optimizer;
    assert_eq!(optimizer.master, MasterType::Bf16);
    assert_eq!(optimizer.moments, MomentsType::Bf16);
    let text = refused(&[&switches[..], &[("optimizer.master", json!("fp32"))]].concat());
    assert!(
        text.contains("optimizer.master: \"fp32\" contradicts bf16.bf16_master_weights_and_grads"),
        "{text}"
    );
}

#[test]
fn lion_has_its_own_betas_and_rate_and_no_eps() {
    let lion = ("optimizer.type", json!("lion"));
    let run = run_with(&[lion.clone(), ("optimizer.params", json!({"eps": 1e-6}))]).unwrap();
    assert_eq!(run.optimizer.kind, OptimizerKind::Lion);
    assert_eq!((run.optimizer.betas, run.optimizer.lr), ([0.9, 0.99], 1e-4));
    let line = "optimizer Lion, lr 1e-4, betas 0.9 and 0.99, weight decay 0";
    assert_eq!(run.summary()[0], line);
    let warnings = run.warnings.join("\n");
    assert!(
        warnings.contains("using 1e-4") && warnings.contains("optimizer.params.eps has no effect"),
        "{warnings}"
    );
    let written = run_with(&[lion]).unwrap().written().join("\n");
    assert!(written.contains("optimizer.type = \"lion\"") && !written.contains(".eps"));
}

#[test]
fn muon_has_torchs_parameters_and_deepspeeds_rates() {
    let muon = ("optimizer.type", json!("muon"));
    let with = |params: Value| run_with(&[muon.clone(), ("optimizer.params", params)]);
    let found = with(json!({})).unwrap();
    let optimizer = &found.optimizer;
    assert_eq!(optimizer.kind, OptimizerKind::Muon);
    assert_eq!((optimizer.betas, optimizer.lr), ([0.9, 0.999], 1e-3));
    let own = MuonSettings {
        adam_lr: 1e-3,
        momentum: 0.95,
        nesterov: true,
        ns_steps: 5,
        ns_coefficients: [3.4445, -4.775, 2.0315],
        adjust_lr_fn: AdjustLr::Original,
    };
    assert_eq!(optimizer.muon, Some(own.clone()));
    let line = "optimizer Muon, lr 1e-3, momentum 0.95 (Nesterov), 5 steps, rates as \"original\"; the rest by AdamW, lr 1e-3, betas 0.9 and 0.999, eps 1e-8, weight decay 0";
    assert_eq!(found.summary()[0], line);
    assert!(found.warnings.join("\n").contains("using 1e-3"));
    // The rates of both, and what is written makes the same run.
    let given = json!({
        "muon_lr": 0.02, "adam_lr": 3e-4, "momentum": 0.9, "nesterov": false, "ns_steps": 3,
        "ns_coefficients": [2, -1.5, 0.5], "adjust_lr_fn": "match_rms_adamw"
    });
    let found = with(given).unwrap();
    assert!(
        found
            .warnings
            .iter()
            .all(|text| !text.contains("params.lr"))
    );
    let changed = MuonSettings {
        adam_lr: 3e-4,
        momentum: 0.9,
        nesterov: false,
        ns_steps: 3,
        ns_coefficients: [2.0, -1.5, 0.5],
        adjust_lr_fn: AdjustLr::MatchRmsAdamw,
    };
    assert_eq!(
        (found.optimizer.lr, &found.optimizer.muon),
        (0.02, &Some(changed))
    );
    let written = found.written().join("\n");
    for part in [
        "muon_lr = 0.02",
        "adam_lr = 0.0003",
        "ns_steps = 3",
        "\"match_rms_adamw\"",
    ] {
        assert!(written.contains(part), "{written}");
    }
    assert_eq!(AdjustLr::Original.factor(8, 2), 2.0);
    assert_eq!(AdjustLr::Original.factor(2, 8), 1.0);
    assert!((AdjustLr::MatchRmsAdamw.factor(2, 100) - 2.0).abs() < 1e-12);
    let muons =
        |key: &str, value: Value| vec![muon.clone(), ("optimizer.params", json!({key: value}))];
    for (changes, part) in [
        (
            muons("momentum", json!(1)),
            "must be at least 0 and less than 1",
        ),
        (muons("ns_steps", json!(100)), "must be 1 to 99"),
        (muons("ns_steps", json!(0)), "must be 1 to 99"),
        (
            muons("adjust_lr_fn", json!("none")),
            "use \"original\" or \"match_rms_adamw\"",
        ),
        (muons("muon_lr", json!(-1)), "optimizer.params.muon_lr"),
        (
            muons("muon_lr", json!(0)),
            "needs a rate of matrices above 0",
        ),
        (
            vec![("optimizer.params", json!({"momentum": 0.9}))],
            "optimizer.params.momentum: is Muon's, and optimizer.type is \"AdamW\"",
        ),
        (
            vec![muon.clone(), ("optimizer.moments", json!("8bit"))],
            "optimizer.moments: Muon's momentum and masters are fp32",
        ),
        (
            vec![
                muon.clone(),
                ("optimizer.master", json!("bf16")),
                ("bf16.enabled", json!(true)),
            ],
            "optimizer.master: Muon's momentum and masters are fp32",
        ),
        (
            vec![muon.clone(), ("fp16.enabled", json!(true))],
            "optimizer.type: \"Muon\" with fp16",
        ),
    ] {
        let text = refused(&changes);
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn weight_decay_groups_are_parsed_and_unmatched_patterns_noted() {
    let decay = |changes: &[(&str, Value)]| run_with(changes).map(|run| run.optimizer.decay);
    assert_eq!(decay(&[]).unwrap(), Decaying::Matrices);
    let all = ("optimizer.params.decay", json!("all"));
    assert_eq!(decay(std::slice::from_ref(&all)).unwrap(), Decaying::All);
    let but = ("optimizer.params.no_decay", json!(["bias", "norm"]));
    let run = run_with(&[all, but.clone()]).unwrap();
    let patterns = ["bias", "norm"].map(str::to_owned).to_vec();
    assert_eq!(run.optimizer.decay, Decaying::AllBut(patterns));
    // The model has no biases: a note, not an error.
    let notes = run.notes.iter().filter(|note| note.contains("no_decay"));
    let notes: Vec<&String> = notes.collect();
    assert_eq!(notes.len(), 1, "{notes:?}");
    assert!(notes[0].contains("no parameter's name contains \"bias\""));
    let line = r#"optimizer.decay.all_but = ["bias","norm"]"#;
    assert!(run.lines().iter().any(|found| found == line));
    let matrices = ("optimizer.params.decay", json!("matrices"));
    assert!(refused(&[matrices, but]).contains("contradicts optimizer.params.no_decay"));
    let empty = ("optimizer.params.no_decay", json!([""]));
    assert!(refused(&[empty]).contains("is in every parameter's name"));
    let odd = ("optimizer.params.decay", json!("norms"));
    assert!(refused(&[odd]).contains("use \"matrices\" or \"all\""));
}

#[test]
fn other_optimizers_are_refused_by_name_with_what_to_do() {
    for (kind, part) in [
        ("muon_clip", "\"muon_clip\" is not supported: use \"Muon\""),
        (
            "adafactor",
            "need whole matrices, and tiles are parts of them",
        ),
        ("paged_lion_8bit", "use \"Lion\""),
        (
            "adamw_8bit",
            "use \"AdamW\", with optimizer.moments = \"8bit\"",
        ),
        (
            "sgd",
            "for a smaller state use \"Lion\" and optimizer.moments",
        ),
        ("paged_adamw_32bit", "offload_optimizer.device = \"cpu\""),
        ("adamw_torch_fused", "use \"AdamW\""),
    ] {
        let text = refused(&[("optimizer.type", json!(kind))]);
        assert!(text.contains(part), "{text}");
    }
}
