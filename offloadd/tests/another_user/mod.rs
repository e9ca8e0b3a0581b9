//! Runs a test again as a user who owns nothing and may lock 64 KiB.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// Command that runs `test` of this program alone, as nobody if this process may become another user.
pub(crate) fn again(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]);
    command.current_dir("/");
    if rustix::process::geteuid().is_root() {
        command.uid(65534).gid(65534);
    }
    command
}

/// Expects success; if that user cannot run this program, prints that the test is skipped.
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
