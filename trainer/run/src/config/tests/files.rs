//! How files and `--set` are read: types, unknown values, formats and defaults.

use super::*;

#[test]
fn written_settings_are_a_run_file_with_the_same_settings() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for name in ["demo", "tiny"] {
        let run = read_file(&root.join(format!("configs/{name}.toml"))).unwrap();
        let text = run.written().join("\n");
        let tree: Value = ::toml::from_str(&text).unwrap();
        let again = check(tree, "other", None).unwrap();
        assert_eq!(again.lines(), run.lines(), "{text}");
        let keys: Vec<&str> = text
            .lines()
            .filter_map(|line| line.split(" = ").next())
            .collect();
        for key in ["train.device", "data.shuffle", "optimizer.params.betas"] {
            assert!(keys.contains(&key), "{key} in {text}");
        }
    }
}

#[test]
fn an_unknown_value_is_refused_with_the_list_of_valid_ones() {
    for (key, part) in [
        ("train.device", "\"tpu\": use \"auto\", \"cpu\" or \"gpu\""),
        (
            "offload.optimizer_device",
            "use \"auto\", \"cpu\", \"gpu\" or \"shared\"",
        ),
        (
            "train.activation_checkpointing",
            "use \"auto\", \"full\", \"attention\" or \"matmuls\"",
        ),
        (
            "offload.optimizer_step",
            "use \"deferred\" or \"immediate\"",
        ),
        ("offload.host_memory_bytes", "expected a number of bytes"),
        ("optimizer.moments", "use \"fp32\", \"bf16\" or \"8bit\""),
        ("optimizer.master", "use \"fp32\" or \"bf16\""),
    ] {
        let text = refused(&[(key, json!("tpu"))]);
        assert!(text.contains(key) && text.contains(part), "{text}");
    }
    let text = refused(&[
        ("offload.optimizer_device", json!("gpu")),
        ("train.device", json!("cpu")),
    ]);
    assert!(text.contains("needs a GPU, and train.device"), "{text}");
}

#[test]
fn a_run_without_steps_needs_no_data() {
    let none: [(&str, Value); 2] = [("train.steps", json!(0)), ("data.files", json!([]))];
    let settings = run_with(&none).unwrap();
    assert_eq!((settings.train.steps, settings.train.stop_after), (0, 0));
    assert!(settings.data.files.is_empty());
    let text = refused(&none[1..]);
    assert!(text.contains("data.files is missing"), "{text}");
}

#[test]
fn set_replaces_values_of_the_file() {
    let mut tree = json!({"train": {"steps": 1}});
    for set in [
        "train.steps=5",
        "offload.socket=/run/x.sock",
        "data.files=[\"a\", \"b\"]",
        "bf16.enabled = true",
    ] {
        apply(&mut tree, set).unwrap();
    }
    let expected = json!({
        "train": {"steps": 5}, "offload": {"socket": "/run/x.sock"}, "data": {"files": ["a", "b"]}, "bf16": {"enabled": true}
    });
    assert_eq!(tree, expected);
    // Text that starts like a structure must be valid TOML; sizes and paths are plain text.
    for (set, value) in [
        ("offload.staging_bytes=64MiB", json!("64MiB")),
        ("train.run_dir=2026-runs/a", json!("2026-runs/a")),
        ("model.path=\"a b\"", json!("a b")),
    ] {
        let mut tree = json!({});
        apply(&mut tree, set).unwrap();
        let (path, _) = set.split_once('=').unwrap();
        let pointer = format!("/{}", path.replace('.', "/"));
        assert_eq!(tree.pointer(&pointer), Some(&value), "{set}");
    }
    for set in [
        "data.files=[\"a\"",
        "data.files=[a, b]",
        "optimizer={lr=}",
        "model.path=\"a",
    ] {
        let text = apply(&mut tree, set).unwrap_err().to_string();
        assert!(text.contains("is not valid TOML: "), "{text}");
    }
    for wrong in ["train.steps", "=5", "a..b=1", "a="] {
        assert!(
            matches!(apply(&mut tree, wrong), Err(SettingsError::Set { .. })),
            "{wrong}"
        );
    }
}

#[test]
fn toml_and_json_files_mean_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let (toml, json) = (dir.path().join("a.toml"), dir.path().join("a.json"));
    std::fs::write(&toml, "[train]\nsteps = 3\nbad = 1").unwrap();
    std::fs::write(&json, "{\"train\": {\"steps\": 3, \"bad\": 1}}").unwrap();
    for path in [&toml, &json] {
        assert!(
            read_file(path)
                .unwrap_err()
                .to_string()
                .contains("unknown key `train.bad")
        );
    }
    let yaml = dir.path().join("run.yaml");
    std::fs::write(&yaml, "base_model: m").unwrap();
    let text = read_file(&yaml).unwrap_err().to_string();
    assert!(text.contains("`trainer init MODEL DATA` writes"), "{text}");
    std::fs::write(&toml, "[train").unwrap();
    std::fs::write(&json, "[1]").unwrap();
    assert!(
        read_file(&toml)
            .unwrap_err()
            .to_string()
            .contains("is not valid TOML")
    );
    assert!(
        read_file(&json)
            .unwrap_err()
            .to_string()
            .contains("outermost value must be an object")
    );
    assert!(
        read_file(Path::new("/nowhere.toml"))
            .unwrap_err()
            .to_string()
            .contains("cannot read the run file /nowhere.toml")
    );
    let run_dir = dir.path();
    std::fs::write(run_dir.join("settings.toml"), "").unwrap();
    let text = read_file(run_dir).unwrap_err().to_string();
    assert!(
        text.contains("it is a run's directory, whose settings are in "),
        "{text}"
    );
}

#[test]
fn a_directory_named_in_two_ways_is_one_directory() {
    let run = run_with(&[
        ("zero_optimization.offload_optimizer.device", json!("nvme")),
        (
            "zero_optimization.offload_optimizer.nvme_path",
            json!(["d", "./d", "/proc", "/proc/../proc"]),
        ),
    ]);
    let paths = run.unwrap().placement.nvme_paths;
    assert_eq!(paths, [Path::new("d"), Path::new("/proc")]);
}

#[test]
fn every_engine_of_the_daemon_is_accepted_by_the_trainer() {
    let nvme = json!({"device": "nvme", "nvme_path": "/mnt/nvme0"});
    let with = |engine: &str| {
        run_with(&[
            ("zero_optimization.offload_optimizer", nvme.clone()),
            ("offload.engine", json!(engine)),
        ])
    };
    for engine in swapper::ENGINES {
        assert_eq!(with(engine).unwrap().offload.engine, engine);
    }
    let text = with("mmap").expect_err("must be refused").to_string();
    assert!(text.contains("\"aio\" or \"psync\""), "{text}");
}

#[test]
fn a_value_of_another_type_is_refused_with_what_was_expected_and_given() {
    for (key, value, expected) in [
        (
            "train.steps",
            json!("many"),
            "train.steps: expected a whole number, got \"many\"",
        ),
        (
            "train.steps",
            json!(2.5),
            "train.steps: expected a whole number, got 2.5",
        ),
        (
            "bf16",
            json!(true),
            "bf16: expected a table, got true: write bf16.enabled = true",
        ),
        (
            "bf16.enabled",
            json!("True"),
            "bf16.enabled: expected true, false or \"auto\", got \"True\"",
        ),
        (
            "data.files",
            json!("a.txt"),
            "data.files: expected a list of paths, or of tables with path, weight, max_samples and format, for example [\"a\", \"b\"], got \"a.txt\": write [\"a.txt\"]",
        ),
        (
            "offload.host_memory_bytes",
            json!([1]),
            "offload.host_memory_bytes: expected a number of bytes, for example 67108864 or \"64MiB\", got [1]",
        ),
        ("train", json!(5), "train: expected a table, got 5"),
        (
            "train.device",
            json!(0),
            "train.device: expected text, got 0",
        ),
    ] {
        let text = refused(&[(key, value)]);
        assert!(text.contains(expected), "{text}");
        assert!(!text.contains("Toml"), "{text}");
    }
}

#[test]
fn nan_and_inf_are_refused_instead_of_counting_as_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.toml");
    for (text, key) in [
        ("gradient_clipping = inf", "gradient_clipping"),
        ("optimizer.params = { lr = nan }", "optimizer.params.lr"),
    ] {
        std::fs::write(&path, text).unwrap();
        let error = read_file(&path).unwrap_err().to_string();
        assert!(
            error.contains(key) && error.contains("nan and inf"),
            "{error}"
        );
    }
    let text = refused(&[("optimizer.params.lr", json!("inf"))]);
    assert!(text.contains("expected a number"), "{text}");
}

#[test]
fn listed_defaults_are_the_ones_in_effect() {
    let path = (
        "zero_optimization.offload_optimizer.nvme_path",
        json!("/nvme"),
    );
    let device = ("zero_optimization.offload_optimizer.device", json!("nvme"));
    let base = [device, path];
    let lines = |changes: &[(&str, Value)]| {
        let all = [&base[..], changes].concat();
        run_with(&all)
            .unwrap_or_else(|error| panic!("{changes:?}: {error}"))
            .lines()
    };
    // Others refuse Muon's own keys.
    let muon = [("optimizer.type", json!("Muon"))];
    let muons = ["nesterov", "ns_steps", "ns_coefficients", "adjust_lr_fn"];
    let mut compared = 0;
    training_settings::keys::each_default(&mut |key, default| {
        let Ok(mut table) =
            ::toml::from_str::<serde_json::Map<String, Value>>(&format!("value = {default}"))
        else {
            return;
        };
        let value = table.remove("value").unwrap();
        // The test's model has the default architecture.
        let name = key.strip_prefix("optimizer.params.").unwrap_or("");
        let with = if muons.contains(&name) {
            &muon[..]
        } else {
            &[]
        };
        let given = [with, &[(key, value)]].concat();
        assert_eq!(lines(&given), lines(with), "{key} = {default}");
        compared += 1;
    });
    assert!(compared > 15, "{compared}");
}
