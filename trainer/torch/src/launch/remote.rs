//! Starts one launcher on each host of a host file, through a remote shell such as ssh.
//!
//! ```text
//!   launch --hostfile ──PROGRAM HOST COMMAND──▶ launch --nnodes N --node-rank R ...   on each host
//!                     ──standard input────────▶ job token, then a line for each signal; its end means: end
//!                     ◀──output────────────────  prefixed with the host's name
//! ```
//!
//! COMMAND is one argument, a line for a POSIX shell. It never contains the job token.

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use offload_support::paths::quoted;
use offload_support::{errln, outln};
use training_ranks::JobToken;

use super::LaunchError;
use super::members::Members;
use super::outside::Outside;
use super::requests::LaunchRequests;
use super::supervise::{Limits, supervise};
use trainer::launch::Hosts;

/// Longest part of a line of output that is passed on at once.
const LINE_BYTES_MAX: u64 = 1 << 16;

/// Time for the last output of hosts that have ended. A remote shell's own background process may hold it longer.
const OUTPUT_END: Duration = Duration::from_secs(2);

/// Starts a launcher on each host with the arguments of `trainer train`, and waits until all have ended. Returns the exit
/// status as `launch` does.
///
/// # Errors
/// The remote shell cannot be started; the host that failed first.
pub(super) fn launch_hosts(options: &Hosts, args: &[OsString]) -> Result<u8, LaunchError> {
    let failed = |what| move |source| LaunchError::Own { what, source };
    let mut requests = LaunchRequests::new()?;
    let token = match &options.token {
        Some(token) => token.clone(),
        None => JobToken::random().map_err(failed("random bytes for the job token"))?,
    };
    // Not this program, but the one that finds libtorch on its host and becomes it.
    let program = std::env::current_exe().map_err(failed("this program"))?;
    let program = program.with_file_name("trainer");
    let dir = std::env::current_dir().map_err(failed("the current directory"))?;
    let names = options.hosts.iter().map(|host| host.name.clone());
    let mut members = Members::hosts(names.collect());
    let (ended, outputs) = channel::<()>();
    for (host, node) in options.hosts.iter().zip(0..) {
        let line = command_line(options, &program, &dir, node, args);
        let mut command = Command::new(&options.shell);
        command
            .arg(&host.name)
            .arg(line)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        let child = members.start(command)?;
        if let Some(input) = &mut child.stdin {
            // A shell that fails at once does not read; its status says more.
            let _ = writeln!(input, "{}", token.secret());
        }
        if let Some(out) = child.stdout.take() {
            pass_on(out, &host.name, ended.clone(), |line| outln!("{line}"));
        }
        if let Some(err) = child.stderr.take() {
            pass_on(err, &host.name, ended.clone(), |line| errln!("{line}"));
        }
    }
    let failures_max = match options.restarts_max {
        0 => 0,
        _ => (options.nodes.max - options.nodes.min) as usize,
    };
    // Launchers end their ranks within 10 s.
    let limits = Limits {
        end: Duration::from_secs(15),
        close: Duration::from_secs(90),
        failures_max,
        ..Limits::default()
    };
    let mut outside = Outside {
        requests: &mut requests,
        nodes: None,
        since: Instant::now(),
    };
    let result = supervise(members, limits, &mut outside);
    drop(ended);
    let until = Instant::now() + OUTPUT_END;
    // Disconnected when every thread has ended.
    let _ = outputs.recv_timeout(until.saturating_duration_since(Instant::now()));
    result
}

/// Line for the shell of host number `node`.
fn command_line(
    hosts: &Hosts,
    program: &std::path::Path,
    dir: &std::path::Path,
    node: usize,
    args: &[OsString],
) -> OsString {
    let mut line = b"cd ".to_vec();
    line.extend(quoted(dir.as_os_str()));
    line.extend(b" && exec ");
    line.extend(quoted(program.as_os_str()));
    let own = [
        "launch".to_owned(),
        format!("--nproc={}", hosts.hosts[node].slots),
        format!("--nnodes={}", hosts.nodes),
        format!("--node-rank={node}"),
        format!("--rendezvous={}", hosts.rendezvous),
        format!("--rendezvous-timeout={}", hosts.timeout.as_secs()),
        format!("--max-restarts={}", hosts.restarts_max),
        "--controlled".to_owned(),
    ];
    for arg in own
        .iter()
        .map(OsStr::new)
        .chain(args.iter().map(OsString::as_os_str))
    {
        line.push(b' ');
        line.extend(quoted(arg));
    }
    OsString::from_vec(line)
}

/// Copies lines of `from`, each with the host's name before it.
fn pass_on(
    from: impl Read + Send + 'static,
    host: &str,
    ended: Sender<()>,
    print: impl Fn(String) + Send + 'static,
) {
    let host = host.to_owned();
    std::thread::spawn(move || {
        let mut from = BufReader::new(from);
        let mut line = Vec::new();
        loop {
            line.clear();
            match from
                .by_ref()
                .take(LINE_BYTES_MAX)
                .read_until(b'\n', &mut line)
            {
                Ok(1..) => {}
                _ => break,
            }
            let text = String::from_utf8_lossy(&line);
            print(format!("[{host}] {}", text.trim_end_matches(['\n', '\r'])));
        }
        drop(ended);
    });
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;
    use trainer::launch::hostfile::Host;

    #[test]
    fn a_shell_sees_each_argument_as_it_was_given() {
        let args = [
            "plain",
            "",
            "two words",
            "it's",
            "$HOME `id` $(id)",
            "a\nb",
            "-x",
            "*",
            "\\",
            "\"",
            "~",
            "a;b&c|d>e",
            "#",
        ];
        let mut line = b"printf '%s\\0' ".to_vec();
        for arg in args
            .iter()
            .map(OsStr::new)
            .chain([OsStr::from_bytes(b"\xff")])
        {
            line.extend(quoted(arg));
            line.push(b' ');
        }
        let output = Command::new("sh")
            .arg("-c")
            .arg(OsString::from_vec(line))
            .output();
        let output = output.unwrap().stdout;
        let found: Vec<&[u8]> = output
            .strip_suffix(b"\0")
            .unwrap()
            .split(|&byte| byte == 0)
            .collect();
        let mut expected: Vec<&[u8]> = args.iter().map(|arg| arg.as_bytes()).collect();
        expected.push(b"\xff");
        assert_eq!(found, expected);
    }

    #[test]
    fn the_command_of_a_host_contains_its_number_and_no_token() {
        let token = JobToken::random().unwrap();
        let host = |name: &str, slots| Host {
            name: name.to_owned(),
            slots,
        };
        let options = Hosts {
            hosts: vec![host("a", 2), host("b", 4)],
            shell: "ssh".into(),
            nodes: "1:2".parse().unwrap(),
            rendezvous: "a:29400".to_owned(),
            timeout: Duration::from_secs(300),
            restarts_max: 3,
            token: Some(token.clone()),
        };
        let args = ["my run.toml", "--fresh"].map(OsString::from);
        let line = command_line(
            &options,
            "/opt/trainer".as_ref(),
            "/my data".as_ref(),
            1,
            &args,
        );
        let line = line.to_str().unwrap();
        assert_eq!(
            line,
            "cd '/my data' && exec /opt/trainer launch '--nproc=4' '--nnodes=1:2' '--node-rank=1' '--rendezvous=a:29400' \
             '--rendezvous-timeout=300' '--max-restarts=3' --controlled 'my run.toml' --fresh"
        );
        assert!(!line.contains(token.secret()));
    }
}
