//! Tests of the settings: defaults, every key, unknown keys, limits.

use super::keys::KEYS;
use super::*;

const WHOLE: &str = r#"
    socket = "/run/offloadd/offloadd.sock"
    devices = ["/mnt/nvme0/tiles", "/mnt/nvme1/tiles"]
    arena_bytes_max = "64GiB"
    engine = "psync"
    require_locked = true
    sessions_max = 16
    iodepth_max = 32
    scrub_bytes_per_s_max = "100MiB"
    rebalance_bytes_per_s_max = "200MiB"
    [metrics]
    listen = "127.0.0.1:9464"
"#;

fn parse(text: &str) -> Result<Config, String> {
    Config::parse(text, Path::new("offloadd.toml")).map_err(|e| e.to_string())
}

#[test]
fn devices_is_the_only_required_key() {
    let config = parse("devices = [\"/mnt/nvme0/tiles\"]").unwrap();
    assert_eq!(config.socket, Path::new(SOCKET_DEFAULT));
    assert_eq!(config.arena_bytes_max, 64 << 30);
    assert_eq!((config.sessions_max, config.iodepth_max), (64, 64));
    let message = parse("sessions_max = 1").unwrap_err();
    assert!(message.contains("devices"), "{message}");
}

#[test]
fn every_key_is_read() {
    let config = parse(WHOLE).unwrap();
    assert_eq!(config.arena_bytes_max, 64 << 30);
    assert_eq!(config.engine, EngineChoice::Psync);
    assert!(config.require_locked);
    assert_eq!((config.sessions_max, config.iodepth_max), (16, 32));
    assert_eq!(
        config.descriptor_socket(),
        Path::new("/run/offloadd/offloadd.sock.fds")
    );
    let table: toml::Table = toml::from_str(WHOLE).unwrap();
    assert!(
        KEYS.iter()
            .all(|key| *key == "quota" || table.contains_key(*key))
    );
    assert_eq!(config.scrub_bytes_per_s_max, 100 << 20);
    assert_eq!(config.limits().rebalance_bytes_per_s_max, Some(200 << 20));
    let listen = config.metrics_listen.unwrap();
    assert_eq!(listen.to_string(), "http://127.0.0.1:9464/metrics");
}

#[test]
fn settings_are_printed_as_they_are_read() {
    // Quotes and a combining character, which Rust escapes as TOML does not, and more bytes than an integer of TOML holds.
    let hard = WHOLE
        .replace("/mnt/nvme0/tiles", "/mnt/cafe\u{301} \\\"a\\\" 'b'/tiles")
        .replace("127.0.0.1:9464", "unix:/run/e\u{301}.sock")
        .replace("64GiB", "8388608TiB")
        + "[quota.default]\ndevice_bytes_max = \"8388608TiB\"\n";
    for text in [WHOLE, hard.as_str()] {
        let config = parse(text).unwrap();
        assert_eq!(parse(&config.to_toml()).unwrap(), config);
    }
}

#[test]
fn an_unknown_key_is_an_error_that_suggests_the_nearest() {
    let message = parse(&WHOLE.replace("devices", "device")).unwrap_err();
    assert!(message.contains("`device`"), "{message}");
    assert!(message.contains("did you mean `devices`"), "{message}");
    for (from, to, expected) in [
        (
            "listen",
            "listne",
            "[metrics]: unknown key `listne`; did you mean `listen`?",
        ),
        (
            "scrub_bytes_per_s_max",
            "scrub_rate_max",
            "unknown key `scrub_rate_max`; did you mean `scrub_bytes_per_s_max`?",
        ),
    ] {
        let message = parse(&WHOLE.replace(from, to)).unwrap_err();
        assert!(message.contains(expected), "{message}");
    }
    let message = parse(&format!("zzz = 1\n{WHOLE}")).unwrap_err();
    assert!(message.contains("known keys: socket"), "{message}");
}

#[test]
fn values_outside_their_limits_are_refused_by_key() {
    for (from, to, key) in [
        ("/run/offloadd/offloadd.sock", "offloadd.sock", "socket"),
        ("/mnt/nvme1/tiles", "/mnt/nvme0/tiles", "devices"),
        ("/mnt/nvme1/tiles", "nvme1/tiles", "devices"),
        ("64GiB", "64Gb", "arena_bytes_max"),
        ("64GiB", "1", "arena_bytes_max"),
        ("psync", "libaio", "engine"),
        ("sessions_max = 16", "sessions_max = 0", "sessions_max"),
        ("iodepth_max = 32", "iodepth_max = 100000", "iodepth_max"),
        // No trainer could begin a session.
        ("iodepth_max = 32", "iodepth_max = 1", "iodepth_max"),
        ("100MiB", "100M", "scrub_bytes_per_s_max"),
        ("100MiB", "1023KiB", "scrub_bytes_per_s_max"),
        ("200MiB", "200MB/h", "rebalance_bytes_per_s_max"),
        ("200MiB", "1023KiB", "rebalance_bytes_per_s_max"),
        ("127.0.0.1:9464", "0.0.0.0:9464", "metrics.listen"),
        ("127.0.0.1:9464", "192.168.1.5:9464", "metrics.listen"),
        ("127.0.0.1:9464", "[::]:9464", "metrics.listen"),
        ("127.0.0.1:9464", "localhost", "metrics.listen"),
        ("127.0.0.1:9464", "unix:metrics.sock", "metrics.listen"),
        (
            "127.0.0.1:9464",
            "unix:/run/offloadd/offloadd.sock.fds",
            "metrics.listen",
        ),
    ] {
        let message = parse(&WHOLE.replace(from, to)).unwrap_err();
        assert!(message.contains(&format!(" {key}: ")), "{message}");
    }
    let long = format!("/{}", "x".repeat(110));
    let message = parse(&WHOLE.replace("/run/offloadd/offloadd.sock", &long)).unwrap_err();
    assert!(message.contains("at most 103 bytes"), "{message}");
}
