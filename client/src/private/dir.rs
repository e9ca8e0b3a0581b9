//! Files of a private daemon and its settings.

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use offload_api::SOCKET_PATH_BYTES_MAX;

use super::own_dir::OwnDir;
use super::{PrivateSettings, failed};
use crate::ClientError;

/// Sessions of a private daemon: one for each rank on this node, and some more.
const SESSIONS_MAX: u32 = 64;

/// Chooses the path of the socket, and creates the directory for it if that is not below `dir`.
pub(super) fn socket_place(dir: &Path) -> Result<(PathBuf, Option<OwnDir>), ClientError> {
    let dir = absolute(dir)?;
    let usual = dir.join("run");
    let socket = usual.join("offloadd.sock");
    if socket.as_os_str().len() <= SOCKET_PATH_BYTES_MAX {
        make_dir(&usual, true)?;
        return Ok((socket, None));
    }
    let base = std::env::var_os("XDG_RUNTIME_DIR").map_or_else(|| "/tmp".into(), PathBuf::from);
    let short = OwnDir::new(&base, "offloadd-private-").map_err(|e| {
        failed(format!(
            "cannot create a directory in {}: {e}",
            base.display()
        ))
    })?;
    Ok((short.path().join("offloadd.sock"), Some(short)))
}

/// Creates `dir`. With `ours_alone` nobody else may enter it, even if it existed.
pub(super) fn make_dir(dir: &Path, ours_alone: bool) -> Result<(), ClientError> {
    let failed = |e: std::io::Error| failed(format!("cannot create {}: {e}", dir.display()));
    let made = fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir);
    made.map_err(failed)?;
    if ours_alone && fs::metadata(dir).map_err(failed)?.mode() & 0o077 != 0 {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o700)).map_err(failed)?;
    }
    Ok(())
}

/// Opens a file that nobody else may read, and creates it if missing.
pub(super) fn own_file(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    options.create(true).mode(0o600).open(path)
}

pub(super) fn config_text(
    socket: &Path,
    settings: &PrivateSettings,
) -> Result<String, ClientError> {
    let mut text = String::from("# Written at each start of a private daemon.\n");
    let devices = settings.devices.iter().map(|(path, _)| path_text(path));
    let devices: Vec<String> = devices.collect::<Result<_, _>>()?;
    let lines = [
        format!("socket = {}", path_text(socket)?),
        format!("devices = [{}]", devices.join(", ")),
        format!("arena_bytes_max = {}", settings.arena_bytes_max),
        format!("iodepth_max = {}", settings.iodepth_max),
        format!("engine = {}", quoted(&settings.engine)),
        // All sessions are this user's.
        format!("sessions_max = {SESSIONS_MAX}"),
        "[quota.default]".into(),
        format!("sessions_max = {SESSIONS_MAX}"),
    ];
    for line in lines {
        writeln!(text, "{line}").expect("writing to a String");
    }
    Ok(text)
}

fn absolute(path: &Path) -> Result<PathBuf, ClientError> {
    std::path::absolute(path).map_err(|e| {
        failed(format!(
            "cannot make the path {} absolute: {e}",
            path.display()
        ))
    })
}

/// The absolute path as a TOML string; the child may run in another directory.
fn path_text(path: &Path) -> Result<String, ClientError> {
    let text = absolute(path)?;
    let text = text
        .to_str()
        .ok_or_else(|| failed(format!("{} is not UTF-8", path.display())))?;
    Ok(quoted(text))
}

/// A TOML basic string. JSON's escapes are a subset of TOML's.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
