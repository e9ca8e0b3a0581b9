//! Runs that cannot start are refused before anything is created, with messages that say what to do.
//!
//! Errors that these tests find: a bad setting is found only after a store was formatted or a run partly
//! created, or its message names no key, path or remedy. Each test checks the message, and that no directory
//! was created.

use std::path::Path;
use std::process::Command;

use crate::daemon::Daemon;
use crate::harness::{Harness, Run, fail, finish, spawn, succeed, until, where_mounted, words};

/// Expects an error whose message contains all of `parts`, and that nothing was created.
fn refused_untouched(harness: &Harness, run: &Run, parts: &[&str]) {
    let text = run.refused();
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    assert!(!run.dir.exists(), "the run directory was created");
    assert!(harness.store_files().is_empty(), "a store was created");
}

#[test]
fn settings_that_contradict_each_other_are_refused() {
    let harness = Harness::new();
    for (sets, parts) in [
        (
            vec!["train.stepz=5"],
            vec!["unknown key `train.stepz`; did you mean `train.steps`?"],
        ),
        (
            vec!["train_batch_size=9", "gradient_accumulation_steps=2"],
            vec!["train_batch_size: 9 contradicts", "= 2 * 2 = 4"],
        ),
        (
            vec!["zero_optimization.offload_optimizer.device=nvme"],
            vec!["offload_optimizer.nvme_path is missing", "offload.socket"],
        ),
        (
            vec!["fp16.enabled=true", "bf16.enabled=true"],
            vec!["fp16.enabled", "bf16.enabled"],
        ),
        (vec!["nonsense"], vec!["--set nonsense: expected key=value"]),
    ] {
        let parts: Vec<&str> = parts.iter().map(|part| &**part).collect();
        refused_untouched(&harness, &harness.run("run", &sets), &parts);
    }
}

#[test]
fn an_option_of_another_program_is_answered_with_its_setting() {
    let harness = Harness::new();
    let run = harness.run("run", &[]);
    for (option, expected) in [
        (
            "--learning_rate=1e-5",
            Some("--set optimizer.params.lr=VALUE"),
        ),
        ("--frehs", None),
    ] {
        let mut command = run.command("train");
        command.arg(option);
        let output = finish(spawn(command));
        assert_eq!(output.status.code(), Some(2));
        let (_, text) = words(&output);
        assert!(
            text.contains(&format!("unexpected argument '{}", &option[..6])),
            "{text}"
        );
        assert_eq!(text.contains("use --set "), expected.is_some(), "{text}");
        assert!(expected.is_none_or(|part| text.contains(part)), "{text}");
    }
}

#[test]
fn texts_that_are_too_short_are_refused() {
    let harness = Harness::new();
    std::fs::write(harness.path("empty"), "").unwrap();
    std::fs::write(harness.path("short"), "16 bytes exactly").unwrap();
    for (name, parts) in [
        (
            "empty",
            ["data.files", "empty is empty: name a file with text in it"],
        ),
        (
            "short",
            [
                "the training text has 16 tokens",
                "train.seq_len = 16 tokens needs 17",
            ],
        ),
        (
            "missing",
            ["data.files: cannot read", "missing: No such file"],
        ),
    ] {
        let files = format!("data.files=[\"{}\"]", harness.path(name).display());
        refused_untouched(&harness, &harness.run("run", &[&files]), &parts);
    }
}

#[test]
fn a_device_or_pipe_is_not_read_as_text() {
    let harness = Harness::new();
    let pipe = harness.path("pipe");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    let made = rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0);
    made.expect("a pipe");
    // One never ends, the other blocks for ever.
    for path in [Path::new("/dev/zero"), &pipe] {
        let files = format!("data.files=[\"{}\"]", path.display());
        let name = path.display().to_string();
        refused_untouched(
            &harness,
            &harness.run("run", &[&files]),
            &[&name, "is neither a file nor a directory"],
        );
    }
}

#[test]
fn directories_that_cannot_hold_a_store_are_refused() {
    let harness = Harness::new();
    let on = |path: &std::path::Path| {
        format!(
            "zero_optimization.offload_optimizer={{device = \"nvme\", nvme_path = \"{}\"}}",
            path.display()
        )
    };
    let missing = harness.path("not-there");
    refused_untouched(
        &harness,
        &harness.run("run", &[&on(&missing)]),
        &["not-there does not exist: create the directory"],
    );
    refused_untouched(
        &harness,
        &harness.run("run", &[&on(&harness.path("text"))]),
        &["text is not a directory"],
    );
    // Nobody can create files there, not even root.
    refused_untouched(
        &harness,
        &harness.run("run", &[&on("/proc".as_ref())]),
        &["nvme_path: cannot write in /proc"],
    );
}

#[test]
fn a_store_larger_than_the_free_space_is_refused() {
    let harness = Harness::new();
    // 1.1 T parameters need 27 TB, more than any test drive has.
    let large = [
        "model.hidden_size=32768",
        "model.intermediate_size=131072",
        "model.num_hidden_layers=64",
        "model.num_attention_heads=256",
        "model.num_key_value_heads=256",
        "train.device=cpu",
        // Large tiles: planning a million small ones took seconds.
        "offload.tile_elems=16777216",
        "offload.staging_bytes=1400000000",
    ];
    let run = harness.run("run", &large).with(&harness.nvme());
    refused_untouched(
        &harness,
        &run,
        &[
            "nvme_path: the file system of ",
            "drive has ",
            " free, but the store needs ",
            "TiB there: free some space, name directories on more drives",
        ],
    );
    let in_memory = harness.run("run", &large);
    // What to change depends on the machine.
    refused_untouched(
        &harness,
        &in_memory,
        &["the run needs ", "of host memory, but ", " is available: "],
    );
}

#[test]
fn a_file_system_without_direct_io_is_refused() {
    let harness = Harness::new();
    let drive = harness.path("drive");
    let run = harness.run("run", &[]).with(&harness.nvme());
    // ramfs has no direct I/O.
    let mount = format!("mount -t ramfs none '{}'", drive.display());
    let Some(inside) = where_mounted(&mount, &run.command("train")) else {
        println!(
            "skipped: a_file_system_without_direct_io_is_refused: mounting a ramfs needs root"
        );
        return;
    };
    let text = fail(inside);
    assert!(
        text.contains("has no direct I/O (O_DIRECT): name a directory on a drive"),
        "{text}"
    );
    assert!(!run.dir.exists());
}

#[test]
fn a_socket_nobody_listens_on_is_named() {
    let harness = Harness::new();
    let socket = format!("offload.socket={}", harness.path("nobody.sock").display());
    let run = harness.run(
        "run",
        &["zero_optimization.offload_optimizer.device=nvme", &socket],
    );
    refused_untouched(
        &harness,
        &run,
        &[
            "no daemon listens on",
            "nobody.sock",
            "start offloadd there",
        ],
    );
}

#[test]
fn a_shared_daemon_ignores_nvme_path_and_a_note_says_so() {
    let harness = Harness::new();
    let daemon = Daemon::start(&harness);
    let elsewhere = harness.path("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let zero = format!(
        "zero_optimization.offload_optimizer={{device = \"nvme\", nvme_path = \"{}\"}}",
        elsewhere.display()
    );
    // As in the help of `train`: a configuration that names a directory, with a socket set on the command
    // line.
    let run = harness.run("run", &[&zero, "train.stop_after=1"]);
    let output = finish(spawn(run.with(&daemon.socket()).command("train")));
    let (said, err) = words(&output);
    assert!(output.status.success(), "{said}{err}");
    assert!(
        err.contains("elsewhere has no effect") && err.contains("behind offload.socket"),
        "{err}"
    );
    assert!(!err.contains('\x1b'), "colors in a file: {err}");
    assert_eq!(std::fs::read_dir(&elsewhere).unwrap().count(), 0);
}

#[test]
fn another_model_in_the_same_run_directory_is_refused() {
    let harness = Harness::new();
    let run = harness.run("run", &["train.steps=1", "scheduler={}"]);
    run.train();
    let fingerprint = run.fingerprint();
    for (set, part) in [
        (
            "model.intermediate_size=128",
            "model.intermediate_size was 64 and is now 128",
        ),
        (
            "bf16.enabled=true",
            "the precision was fp32 and is now bf16",
        ),
        (
            "optimizer.moments=bf16",
            "optimizer.moments was the default and is now bf16",
        ),
        (
            "optimizer.type=Lion",
            "optimizer.type was the default and is now Lion",
        ),
    ] {
        let text = harness
            .run("run", &["train.steps=1", "scheduler={}", set])
            .refused();
        assert!(text.contains(part) && text.contains("--fresh"), "{text}");
    }
    assert_eq!(
        harness
            .run("run", &["train.steps=1", "scheduler={}"])
            .fingerprint(),
        fingerprint
    );
}

#[test]
fn a_second_trainer_in_a_run_directory_is_refused() {
    let harness = Harness::new();
    let run = harness.run("run", &["train.steps=100000", "scheduler={}"]);
    let metrics = run.dir.join("metrics.jsonl");
    let first = spawn(run.command("train"));
    let mut first = until(first, "it wrote its first line", || metrics.exists());
    let text = run.refused();
    assert!(text.contains("another trainer is using"), "{text}");
    first.kill().unwrap();
    first.wait().unwrap();
}

#[test]
fn changed_settings_and_data_are_reported_and_used() {
    let harness = Harness::new();
    let run = harness.run("run", &["train.stop_after=2", "train.device=cpu"]);
    run.train();
    std::fs::write(harness.path("text"), crate::harness::text(30_000)).unwrap();
    let changed = [
        "train.device=cpu",
        "train.threads=2",
        "optimizer.params.lr=0.5",
        "model.attention_dropout=0.1",
        "train.seq_len=8",
    ];
    let said = harness.run("run", &changed).train();
    for note in [
        "note: the data was 2000",
        "note: optimizer.params.lr was 0.003 up to step 2 and is 0.5 from now on",
        "note: dropout was none up to step 2 and is attention_dropout 0.1 from now on",
        "note: train.seq_len was 16 up to step 2 and is 8 from now on",
        "note: train.threads was 1 up to step 2 and is 2 from now on",
        "note: the data is divided into other windows: the run resumes at window 4 of them",
    ] {
        assert!(said.contains(note), "{note}: {said}");
    }
}

#[test]
fn help_shows_how_to_use_it() {
    for (verb, part) in [
        ("train", "trainer train RUN.toml --set"),
        ("fingerprint", "trainer fingerprint RUN.toml"),
        ("plan", "trainer plan RUN.toml --json"),
    ] {
        let mut command = Command::new(crate::harness::trainer());
        command
            .env_remove("GOMP_SPINCOUNT")
            .env_remove("OMP_WAIT_POLICY")
            .args([verb, "--help"])
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped());
        let text = succeed(command);
        assert!(
            text.contains("Examples:") || text.contains("Example:"),
            "{text}"
        );
        assert!(text.contains(part), "{text}");
        assert!(
            text.contains(&format!("Usage: trainer {verb} ")),
            "its name is in {text}"
        );
    }
}

#[test]
fn a_private_daemon_grants_the_iodepth_that_a_run_sets() {
    let harness = Harness::new();
    // Scratch tiles get no operations beyond the largest number of a session.
    for (iodepth, place) in [(200, "gpu"), (1024, "nvme")] {
        let sets = [
            format!("offload.iodepth={iodepth}"),
            format!("offload.activations={place}"),
        ];
        let run = harness.run(&format!("deep-{place}"), &[]);
        let mut command = run.with(&harness.nvme()).with(&sets).command("train");
        command.arg("--verbose");
        let said = succeed(command);
        assert!(said.contains(&format!("iodepth {iodepth}")), "{said}");
    }
}
