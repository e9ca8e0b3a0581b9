//! Tests that damage is found and named, and that nothing else is. Bytes are changed between a call that writes and one that reads.

use std::os::unix::fs::FileExt;

use serde_json::Value;

use crate::harness::{
    assert_empty, bench_io, drive, json, printed, refused, says_how_it_went, says_what_it_is_of,
};

#[test]
fn what_comes_back_as_written_is_found_right_and_nothing_stays() {
    let dir = drive();
    let path = dir.path().to_str().unwrap();
    for target in ["device", "daemon"] {
        let args = [
            "verify",
            "--target",
            target,
            "--bs=64k",
            "--size=4m",
            "--numjobs=2",
            "--json",
            "--directory",
            path,
        ];
        let report = json(&args);
        assert_eq!(report["bytes"], 8 << 20, "{target}");
        assert_eq!(report["wrong_blocks"], 0);
        says_what_it_is_of(&report, dir.path());
        assert_eq!(report["settings"]["passes"], 2);
        for pass in report["passes"].as_array().unwrap() {
            says_how_it_went(&pass["write"], "write");
            says_how_it_went(&pass["check"], "read");
        }
        assert_empty(dir.path());
    }
}

#[test]
fn what_was_left_out_is_said() {
    let dir = drive();
    let [small, large] = ["small", "large"].map(|name| dir.path().join(name));
    std::fs::write(&small, vec![0; (4 << 20) + 4096]).unwrap();
    std::fs::write(&large, vec![0; 6 << 20]).unwrap();
    let words = ["verify", "--bs=64k", "--json", "--overwrite"];
    let files = [&small, &large].map(|path| ["--filename", path.to_str().unwrap()]);
    let report = json(&[&words[..], files.as_flattened()].concat());
    assert_eq!(report["bytes"], 2 * 2 * (4 << 20), "two passes, two files");
    let warnings = report["warnings"].to_string();
    for printed in [
        "small: 4096 bytes from byte 4194304 are not used",
        "large: 2097152 bytes from byte 4194304 are not used",
    ] {
        assert!(warnings.contains(printed), "{warnings}");
    }
}

#[test]
fn every_wrong_block_is_named_with_what_lies_there() {
    let dir = drive();
    let file = dir.path().join("drive");
    std::fs::write(&file, vec![0; 4 << 20]).unwrap();
    let path = file.to_str().unwrap();
    let verify = |only: &str, pass: &str, more: &[&str]| {
        bench_io(
            &[
                &[
                    "verify",
                    "--bs=64k",
                    "--json",
                    "--filename",
                    path,
                    "--only",
                    only,
                    "--pass",
                    pass,
                ],
                more,
            ]
            .concat(),
        )
    };
    let wrote = verify("write", "7", &["--overwrite"]);
    assert!(wrote.status.success(), "{}", printed(&wrote));
    assert!(verify("read", "7", &[]).status.success());

    let drive = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(&file)
        .unwrap();
    let mut block = vec![0; 8192];
    drive.read_exact_at(&mut block, 65536).unwrap();
    drive.write_all_at(&block, 1 << 20).unwrap();
    drive.write_all_at(&[0; 4096], 2 << 20).unwrap();
    drive
        .read_exact_at(&mut block[..1], (3 << 20) + 5000)
        .unwrap();
    drive
        .write_all_at(&[block[0] ^ 1], (3 << 20) + 5000)
        .unwrap();
    drive.sync_all().unwrap();

    let output = verify("read", "7", &[]);
    assert!(!output.status.success());
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["wrong_blocks"], 4);
    let found: Vec<(u64, u64, &Value)> = report["wrong"]
        .as_array()
        .unwrap()
        .iter()
        .map(|range| {
            assert_eq!(range["file"], path);
            let number = |name: &str| range[name].as_u64().unwrap();
            (number("offset"), number("bytes"), &range["found"])
        })
        .collect();
    let misplaced = serde_json::json!({"other_place": {"device": 0, "offset": 65536}});
    let damaged = serde_json::json!({"damage": {"byte": 904}});
    let expected = [
        (1 << 20, 8192, &misplaced),
        (2 << 20, 4096, &Value::from("zeros")),
        ((3 << 20) + 4096, 4096, &damaged),
    ];
    assert_eq!(found, expected);
    // A pass that was never written: all blocks are old.
    let old = verify("read", "8", &[]);
    let report: Value = serde_json::from_slice(&old.stdout).unwrap();
    assert_eq!(report["wrong_blocks"], (4 << 20) / 4096);
    // One line for a contiguous range, with the number as --pass takes it.
    let old = bench_io(&[
        "verify",
        "--bs=64k",
        "--filename",
        path,
        "--only=read",
        "--pass=30",
    ]);
    let lines = String::from_utf8_lossy(&old.stdout).into_owned();
    assert!(
        lines.contains("pass 30: ") && lines.contains("the bytes of another pass (7)"),
        "{lines}"
    );
    assert_eq!(lines.matches("pass 30: ").count(), 7, "{lines}");
}

#[test]
fn nothing_is_destroyed_or_half_done_by_a_wrong_word() {
    let dir = drive();
    let file = dir.path().join("precious");
    std::fs::write(&file, vec![7; 1 << 20]).unwrap();
    let path = file.to_str().unwrap();
    for (args, why) in [
        (vec!["--bs=64k", "--filename", path], "--overwrite"),
        (vec!["--only=read", "--filename", path], "--pass"),
        (
            vec!["--direct=0", "--overwrite", "--filename", path],
            "direct = 0",
        ),
        (vec!["--passes=0"], "0 is not in"),
    ] {
        let printed = refused(&[&["verify"], &args[..]].concat());
        assert!(printed.contains(why), "{args:?}: {printed}");
    }
    assert_eq!(std::fs::read(&file).unwrap(), vec![7; 1 << 20]);
}
