//! Makes system calls fail or take long, with strace.

use std::process::Command;

/// Returns a command for strace that follows threads and prints nothing, without a program yet; `None`, with a message, where it cannot trace.
pub(crate) fn strace() -> Option<Command> {
    let probe = Command::new("strace")
        .args(["-f", "-qq", "-e", "trace=none", "true"])
        .output();
    if !probe.is_ok_and(|output| output.status.success()) {
        println!(
            "skipped: {}: strace cannot trace here",
            std::thread::current().name().unwrap_or("a test")
        );
        return None;
    }
    let mut command = Command::new("strace");
    command.args(["-f", "-qq", "-o", "/dev/null"]);
    Some(command)
}
