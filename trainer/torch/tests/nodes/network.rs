//! Nodes as network namespaces: each has one interface, and a bridge in a namespace of its own joins them.
//!
//! ```text
//!   node 0: eth0 10.77.0.1 ──veth── port0 ┐
//!   node 1: eth0 10.77.0.2 ──veth── port1 ┴ bridge (namespace "switch")
//! ```
//!
//! Nothing of the machine's own network is used, so tests that run at the same time do not meet. Making namespaces needs root
//! and iproute2.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

const PREFIX: &str = "offloadd-test";

/// Namespaces, deleted on drop.
pub(crate) struct Network {
    name: String,
    nodes: u32,
}

impl Network {
    /// Makes `nodes` nodes, or says why the test is skipped.
    pub(crate) fn new(nodes: u32, what: &str) -> Option<Network> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        if !rustix::process::geteuid().is_root() {
            println!("skipped: {what}: only root can make network namespaces");
            return None;
        }
        if ["ip", "tc"]
            .iter()
            .any(|program| !succeeds(Command::new(program).arg("-V")))
        {
            println!("skipped: {what}: there is no ip or tc (iproute2)");
            return None;
        }
        delete_leftovers();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let network = Network {
            name: format!("{PREFIX}-{}-{number}", std::process::id()),
            nodes,
        };
        let switch = network.switch();
        let mut script = format!(
            "ip netns add {switch}\nip -n {switch} link add bridge type bridge\nip -n {switch} link set bridge up\n"
        );
        for node in 0..nodes {
            let (name, address) = (network.namespace(node), network.address(node));
            script += &format!(
                "ip netns add {name}
                ip -n {name} link set lo up
                ip -n {name} link add eth0 type veth peer name port{node} netns {switch}
                ip -n {switch} link set port{node} master bridge up
                ip -n {name} address add {address}/24 dev eth0
                ip -n {name} link set eth0 up\n"
            );
        }
        let made = Command::new("sh").args(["-ec", &script]).output();
        let made = made.expect("sh runs");
        if !made.status.success() {
            let said = String::from_utf8_lossy(&made.stderr).into_owned();
            println!(
                "skipped: {what}: no network namespaces: {}",
                said.trim_end()
            );
            return None;
        }
        Some(network)
    }

    fn switch(&self) -> String {
        format!("{}-switch", self.name)
    }

    /// Name of a node's namespace.
    pub(crate) fn namespace(&self, node: u32) -> String {
        format!("{}-{node}", self.name)
    }

    /// A node's address.
    pub(crate) fn address(&self, node: u32) -> String {
        format!("10.77.0.{}", node + 1)
    }

    /// Returns `command` as it runs on a node. It has the same environment, and its output is piped.
    pub(crate) fn on(&self, node: u32, command: &Command) -> Command {
        let mut inside = Command::new("ip");
        inside.args(["netns", "exec", &self.namespace(node)]);
        inside.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(name, value),
                None => inside.env_remove(name),
            };
        }
        inside
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        inside
    }

    /// Output of a short command on a node.
    pub(crate) fn output(&self, node: u32, command: &[&str]) -> String {
        let mut inside = Command::new(command[0]);
        inside.args(&command[1..]);
        let output = self.on(node, &inside).output().expect("it runs");
        assert!(output.status.success(), "{command:?}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Cuts a node's cable.
    pub(crate) fn cut(&self, node: u32) {
        self.set_cable(node, "down");
    }

    /// Mends a node's cable if it was cut.
    pub(crate) fn join(&self, node: u32) {
        self.set_cable(node, "up");
    }

    fn set_cable(&self, node: u32, to: &str) {
        let port = format!("port{node}");
        let mut command = Command::new("ip");
        command.args(["-n", &self.switch(), "link", "set", &port, to]);
        assert!(succeeds(&mut command), "{command:?}");
    }

    /// Makes a node's outgoing link slow, with a queue so short that it loses packets. Where the kernel has `netem`, packets
    /// are also delayed, and lost at random.
    pub(crate) fn impair(&self, node: u32) {
        let tc = |args: &[&str]| {
            let mut command = Command::new("tc");
            command.args([
                "-n",
                &self.namespace(node),
                "qdisc",
                "add",
                "dev",
                "eth0",
                "root",
            ]);
            succeeds(command.args(args))
        };
        let slow = ["tbf", "rate", "20mbit", "burst", "16k", "limit", "16k"];
        assert!(
            tc(&["netem", "delay", "5ms", "2ms", "loss", "1%"]) || tc(&slow),
            "tc can slow a link"
        );
    }

    /// Packets that a node's outgoing link has lost.
    pub(crate) fn lost_packets(&self, node: u32) -> u64 {
        let said = self.output(node, &["tc", "-s", "qdisc", "show", "dev", "eth0"]);
        let dropped = said.split("dropped ").nth(1).expect("a counter");
        let digits = dropped.split(|c: char| !c.is_ascii_digit()).next();
        digits.expect("a number").parse().expect("a number")
    }

    /// Processes of a node.
    pub(crate) fn pids(&self, node: u32) -> Vec<i32> {
        let said = Command::new("ip")
            .args(["netns", "pids", &self.namespace(node)])
            .output();
        let pids = String::from_utf8_lossy(&said.expect("ip runs").stdout).into_owned();
        let pids = pids.split_whitespace().map(|pid| pid.parse());
        pids.map(|pid| pid.expect("a process id")).collect()
    }

    /// Kills every process of a node at once, as a power failure does.
    pub(crate) fn kill(&self, node: u32) {
        for pid in self.pids(node) {
            let pid = rustix::process::Pid::from_raw(pid).expect("not 0");
            // It may have ended with another one.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // A failed test leaves its processes.
        for node in 0..self.nodes {
            self.kill(node);
            delete(&self.namespace(node));
        }
        delete(&self.switch());
    }
}

fn delete(namespace: &str) {
    // Tests at the same time may delete the same leftovers.
    let _ = Command::new("ip")
        .args(["netns", "delete", namespace])
        .output();
}

/// Deletes the namespaces of tests that were killed.
fn delete_leftovers() {
    let Ok(entries) = std::fs::read_dir("/run/netns") else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let rest = name
            .strip_prefix(PREFIX)
            .and_then(|rest| rest.strip_prefix('-'));
        let pid = rest.and_then(|rest| rest.split('-').next());
        if pid.is_some_and(|pid| !std::path::Path::new("/proc").join(pid).exists()) {
            delete(&name);
        }
    }
}

fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}
