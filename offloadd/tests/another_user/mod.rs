//! For tests that run themselves again as a user to whom nothing belongs, and who may lock 64 KiB.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// This program, which will run `test` alone, and as nobody if we may become another user.
pub(crate) fn again(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]);
    command.current_dir("/");
    if rustix::process::geteuid().is_root() {
        command.uid(65534).gid(65534);
    }
    command
}

/// Expects it to end well; where that user cannot run this program, says that the test is skipped.
pub(crate) fn expect_success(mut command: Command) {
    match command.output() {
        Ok(output) => assert!(
            output.status.success(),
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        ),
        Err(error) => println!(
            "skipped: {}: another user cannot run this program: {error}",
            std::thread::current().name().unwrap_or("a test")
        ),
    }
}
