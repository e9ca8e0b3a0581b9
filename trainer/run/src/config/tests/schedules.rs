//! Lengths of runs, and schedules of the learning rate.

use super::*;

#[test]
fn schedulers_are_deepspeeds() {
    let with = |kind: &str, warmup: u64| {
        run_with(&[
            ("scheduler.type", json!(kind)),
            ("scheduler.params.warmup_num_steps", json!(warmup)),
        ])
    };
    let warmup = Warmup {
        min_lr: 0.0,
        max_lr: 0.001,
        steps: 20,
        logarithmic: true,
    };
    assert_eq!(with("WarmupLR", 20).unwrap().lr, LrSchedule::Warmup(warmup));
    assert_eq!(
        with("WarmupDecayLR", 20).unwrap().lr,
        LrSchedule::WarmupDecay {
            warmup,
            total_steps: 100
        }
    );
    assert!(matches!(
        with("WarmupCosineLR", 20).unwrap().lr,
        LrSchedule::WarmupCosine {
            total_steps: 100,
            ..
        }
    ));
    let text = with("LRRangeTest", 20).unwrap_err().to_string();
    assert!(
        text.contains("LRRangeTest has no parameter warmup_num_steps; its parameters are lr_range_test_min_lr, "),
        "{text}"
    );
    // DeepSpeed accepts these too; a note reports the effect.
    for steps in [0, 1, 100] {
        let notes = with("WarmupDecayLR", steps).unwrap().notes;
        assert!(
            notes
                .iter()
                .any(|note| note.contains("warmup_num_steps is ")),
            "{notes:?}"
        );
    }
    assert_eq!(
        with("WarmupLR", 1).unwrap().lr,
        with("WarmupLR", 2).unwrap().lr
    );
    assert_eq!(
        run_with(&[]).unwrap().lr,
        LrSchedule::Constant {
            lr: 0.001,
            warmup_steps: 0
        }
    );
}

#[test]
fn hugging_faces_schedules_take_their_warmup_in_steps_or_as_a_ratio() {
    let of = |kind: &str, key: &str, warmup: Value| {
        let warmup = (&*format!("scheduler.params.{key}"), warmup);
        run_with(&[("scheduler.type", json!(kind)), (warmup.0, warmup.1)])
    };
    let cosine = |warmup_steps| LrSchedule::Cosine {
        lr: 0.001,
        warmup_steps,
        total_steps: 100,
    };
    assert_eq!(
        of("cosine", "warmup_steps", json!(7)).unwrap().lr,
        cosine(7)
    );
    // Rounded up.
    let ratio = of("cosine", "warmup_ratio", json!(0.025));
    assert_eq!(ratio.unwrap().lr, cosine(3));
    let constant = LrSchedule::Constant {
        lr: 0.001,
        warmup_steps: 5,
    };
    assert_eq!(
        of("constant", "warmup_steps", json!(5)).unwrap().lr,
        constant
    );
    let text = of("linear", "warmup_steps", json!(101)).unwrap_err();
    assert!(
        text.to_string()
            .contains("101 is more than the 100 steps of the run")
    );
    let text = of("WarmupLR", "warmup_ratio", json!(0.1)).unwrap_err();
    assert!(text.to_string().contains("has no parameter warmup_ratio"));
    let both = [
        ("scheduler.type", json!("linear")),
        ("scheduler.params.warmup_steps", json!(1)),
        ("scheduler.params.warmup_ratio", json!(0.1)),
    ];
    assert!(refused(&both).contains("contradicts scheduler.params.warmup_steps"));
}

#[test]
fn epochs_become_steps_when_the_length_of_the_data_is_known() {
    let mut run = run_with(&[
        ("train.steps", json!(null)),
        ("train.epochs", json!(1.5)),
        ("scheduler.type", json!("cosine")),
        ("scheduler.params.warmup_ratio", json!(0.1)),
    ])
    .unwrap();
    // 1.5 * 21 windows in steps of 2.
    run.set_windows(21).unwrap();
    assert_eq!((run.train.steps, run.train.stop_after), (16, 16));
    let cosine = LrSchedule::Cosine {
        lr: 0.001,
        warmup_steps: 2,
        total_steps: 16,
    };
    assert_eq!(run.lr, cosine);
    assert!(
        !run.warnings
            .iter()
            .any(|warning| warning.contains("passes over"))
    );
    // Resumed: after no step, after steps of this size, and after steps of one window.
    assert_eq!(run.missed_epochs(21, 0, 0), None);
    assert_eq!(run.missed_epochs(21, 8, 16), None);
    let missed = run.missed_epochs(21, 8, 8).unwrap();
    for part in ["at epoch 1.14, not at 1.5", "train.steps = 20 in place"] {
        assert!(missed.contains(part), "{missed}");
    }
    let mut run = run_with(&[]).unwrap();
    run.set_windows(21).unwrap();
    assert_eq!(run.train.steps, 100);
    let warned = |warning: &String| warning.contains("passes over its data 9.5 times");
    assert!(run.warnings.iter().any(warned), "{:?}", run.warnings);
    let both = ("train.epochs", json!(1));
    assert!(refused(&[both]).contains("contradicts train.steps"));
    let none = [("train.steps", json!(null)), ("train.epochs", json!(0))];
    assert!(refused(&none).contains("must be more than 0"));
    let best = ("train.checkpoint_best", json!(true));
    assert!(refused(&[best]).contains("needs evaluations: set train.eval_every"));
    // A contradiction may only show now.
    let mut run = run_with(&[
        ("train.steps", json!(null)),
        ("train.epochs", json!(1)),
        ("train.stop_after", json!(50)),
    ])
    .unwrap();
    let text = run.set_windows(20).unwrap_err().to_string();
    assert!(text.contains("train.stop_after"), "{text}");
}

#[test]
fn a_length_on_the_command_line_replaces_the_other_kind_of_length() {
    let train = |sets: &[&str]| {
        let mut tree = json!({"train": {"epochs": 3, "seed": 1}});
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        apply_overrides(&mut tree, &sets).unwrap();
        tree["train"].clone()
    };
    assert_eq!(train(&["train.steps=5"]), json!({"steps": 5, "seed": 1}));
    assert_eq!(
        train(&["train.epochs = 1"]),
        json!({"epochs": 1, "seed": 1})
    );
    let both = train(&["train.steps=5", "train.epochs=1"]);
    assert_eq!(both, json!({"steps": 5, "epochs": 1, "seed": 1}));
}

#[test]
fn a_run_of_few_steps_is_warned_about_with_its_windows() {
    let mut run = run_with(&[("train.steps", json!(null)), ("train.epochs", json!(1))]).unwrap();
    run.set_windows(2).unwrap();
    let text = run.warnings.join("\n");
    assert!(
        text.contains("the run has only 1 step: a step takes ") && text.contains("the data has 2;"),
        "{text}"
    );
}

#[test]
fn a_run_whose_learning_rate_stays_0_is_warned_about() {
    let warnings = |changes: &[(&str, Value)]| {
        let length = [("train.steps", json!(null)), ("train.epochs", json!(1))];
        let scheduler = ("scheduler.type", json!("cosine"));
        let mut run = run_with(&[&length[..], &[scheduler], changes].concat()).unwrap();
        run.set_windows(2).unwrap();
        run.warnings.join("\n")
    };
    let warm = ("scheduler.params.warmup_ratio", json!(0.03));
    let text = warnings(std::slice::from_ref(&warm));
    assert!(
        text.contains("learns nothing: its warm-up takes all of 1 step"),
        "{text}"
    );
    for changes in [&[][..], &[warm, ("optimizer.params.lr", json!(0))]] {
        let text = warnings(changes);
        assert!(!text.contains("learns nothing"), "{text}");
    }
}

#[test]
fn an_invalid_one_cycle_schedule_is_refused() {
    let with = |changes: &[(&str, Value)]| {
        let base = [
            ("scheduler.type", json!("OneCycle")),
            ("scheduler.params.cycle_min_lr", json!(0.1)),
            ("scheduler.params.cycle_max_lr", json!(0.2)),
        ];
        let changes: Vec<(String, Value)> = (changes.iter())
            .map(|(key, value)| (format!("scheduler.params.{key}"), value.clone()))
            .collect();
        let changes = changes.iter().map(|(key, value)| (&**key, value.clone()));
        let all: Vec<(&str, Value)> = base.into_iter().chain(changes).collect();
        run_with(&all).map_err(|error| error.to_string())
    };
    assert!(with(&[]).is_ok());
    for (key, number, part) in [
        ("cycle_max_lr", json!(null), "cycle_max_lr is missing"),
        ("cycle_first_step_size", json!(0), "must be at least 1"),
        ("cycle_min_mom", json!(1), "less than 1"),
        ("decay_lr_rate", json!(-1), "must not be negative"),
        (
            "total_num_steps",
            json!(5),
            "OneCycle has no parameter total_num_steps",
        ),
    ] {
        let text = with(&[(key, number)]).unwrap_err();
        assert!(text.contains(part), "{key}: {text}");
    }
    let grows = [
        ("cycle_first_step_size", json!(2)),
        ("decay_step_size", json!(1)),
        ("decay_mom_rate", json!(0.1)),
    ];
    let text = with(&grows).unwrap_err();
    assert!(
        text.contains("at step 100, but must stay below 1"),
        "{text}"
    );
}
