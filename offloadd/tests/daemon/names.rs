//! Tests paths on the command line. What could go wrong: a device under another name taken for a foreign one, advice that does not help, a refusal
//! that repeats itself, a file that was created or truncated without need.

use std::os::unix::fs::symlink;
use std::path::Path;

use crate::common::{Store, program, words};
use crate::growth::device;

#[test]
fn a_device_by_another_name_is_named_as_the_store_has_it() {
    let store = Store::new(2, "auto");
    let [link, hard] = ["link", "hard"].map(|name| store.dir.path().join(name));
    symlink(&store.devices[1], &link).unwrap();
    std::fs::hard_link(&store.devices[1], &hard).unwrap();
    let expected = format!(
        "is already device 1 of the store, under the name {}",
        store.devices[1].display()
    );
    let add = |path: &Path| {
        let output = device(&store, "add", path, &["--force"]);
        assert!(words(&output).contains(&expected), "{}", words(&output));
        assert!(!output.status.success());
    };
    let _daemon = store.serve();
    add(&link);
    add(&hard);
}

#[test]
fn what_cannot_be_formatted_is_told_once_and_nothing_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let refusal = |path: &Path, more: &[&str]| {
        let mut command = program();
        let output = command.arg("format").arg(path).args(more).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", words(&output));
        words(&output)
    };
    for path in [dir.path(), Path::new("/dev/null")] {
        let printed = refusal(path, &["--size", "1GiB"]);
        let expected = format!(
            "offloadd: device {}: neither a regular file nor a block device\n",
            path.display()
        );
        assert_eq!(printed, expected, "`--force` would not help");
    }
    let file = dir.path().join("tiles");
    for size in ["0", "4095", "1MiB"] {
        let printed = refusal(&file, &["--size", size]);
        assert!(
            printed.contains("a device of a store needs at least"),
            "{printed}"
        );
        assert!(!file.exists());
    }
    let printed = refusal(&file, &[]);
    assert_eq!(
        printed.matches("its size is missing").count(),
        1,
        "{printed}"
    );
    assert!(!file.exists());
    // Even with `--force`, a file is not truncated to a size that is too small for a store.
    std::fs::write(&file, vec![7; 10_000]).unwrap();
    refusal(&file, &["--size", "0", "--force"]);
    assert_eq!(std::fs::read(&file).unwrap(), vec![7; 10_000]);
}
