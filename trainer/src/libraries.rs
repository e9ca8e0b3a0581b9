//! Finds the libraries of a program as the loader would, or names those that are missing and what to do.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The version of PyTorch whose libtorch the program is linked with. PyTorch's C++ interface changes with each version.
const TORCH: &str = "2.11";

/// Directory in which the loader looks for libtorch first where programs are installed, as the build writes it into the program.
const INSTALLED: &str = "$ORIGIN/../lib/libtorch/torch/lib";

/// Script of the Debian package that fetches libtorch.
const FETCH: &str = "/usr/share/offloadd-trainer/fetch-libtorch.py";

/// The loader's answer about a program.
#[derive(Debug, Default, PartialEq)]
struct LoaderAnswer {
    /// Libraries that were not found.
    missing: Vec<String>,
    /// Complaints about versions of symbols: a library is older than the one at build time.
    too_old: Vec<String>,
    /// Directory of libtorch, if it was found.
    torch_lib: Option<PathBuf>,
}

/// A directory of libraries, and how it was found.
struct Candidate {
    name: &'static str,
    dir: PathBuf,
}

/// Returns the `LD_LIBRARY_PATH` with which the program finds all its libraries; `None` if it needs no other than it has.
///
/// # Errors
/// A text that names the missing libraries and what to do.
pub(crate) fn library_path(program: &Path) -> Result<Option<OsString>, String> {
    let Some(found) = load(program, None) else {
        // The program's own start shows why the loader does not answer.
        return Ok(None);
    };
    let mut tried = Vec::new();
    match refusal(&found) {
        None => return Ok(None),
        Some(reason) => tried.push(reason),
    }
    let (candidates, python) = candidates();
    for Candidate { name, dir } in candidates {
        let path = with_dir(&dir);
        match load(program, Some(&path)).as_ref().map(refusal) {
            Some(None) => return Ok(Some(path)),
            Some(Some(reason)) => tried.push(format!("with {name} {}: {reason}", dir.display())),
            None => {}
        }
    }
    tried.extend(python);
    Err(text(program, &found, &tried))
}

/// Asks the loader which libraries it would load.
fn load(program: &Path, library_path: Option<&OsString>) -> Option<LoaderAnswer> {
    let mut command = Command::new(program);
    command.env("LD_TRACE_LOADED_OBJECTS", "1");
    command.envs(library_path.map(|path| ("LD_LIBRARY_PATH", path)));
    let output = command.output().ok()?;
    let texts = [output.stdout, output.stderr];
    Some(parse(
        &texts.map(|text| String::from_utf8_lossy(&text).into_owned()),
    ))
}

/// Reads the loader's lists: `NAME => PATH (ADDRESS)`, `NAME => not found`, `PATH: version `NAME' not found (...)`.
fn parse([list, complaints]: &[String; 2]) -> LoaderAnswer {
    let mut loaded = LoaderAnswer::default();
    for (name, place) in list
        .lines()
        .filter_map(|line| line.trim().split_once(" => "))
    {
        if place == "not found" && !loaded.missing.iter().any(|known| known == name) {
            loaded.missing.push(name.to_owned());
        }
        if name == "libtorch_cpu.so" && place != "not found" {
            let path = place.rsplit_once(" (").map_or(place, |(path, _)| path);
            loaded.torch_lib = Path::new(path).parent().map(Path::to_owned);
        }
    }
    let complaints = complaints
        .lines()
        .filter(|line| line.contains("version `"))
        .map(|line| line.trim().to_owned());
    loaded.too_old = complaints.collect();
    loaded
}

/// Returns why a program cannot run with these libraries; `None` if it can.
fn refusal(loaded: &LoaderAnswer) -> Option<String> {
    if !loaded.missing.is_empty() {
        return Some(format!("not found: {}", loaded.missing.join(", ")));
    }
    if let Some(complaint) = loaded.too_old.first() {
        return Some(complaint.clone());
    }
    let lib = loaded.torch_lib.as_deref()?;
    let version = version_of(lib)?;
    (!is_wanted(&version)).then(|| format!("{} is of torch {version}", lib.display()))
}

fn is_wanted(version: &str) -> bool {
    version
        .strip_prefix(TORCH)
        .is_some_and(|rest| rest.starts_with('.'))
}

/// Returns the version of the torch directory that contains `lib`, if a file there tells it.
fn version_of(lib: &Path) -> Option<String> {
    let torch = lib.parent()?;
    if let Ok(version) = std::fs::read_to_string(torch.join("build-version")) {
        return Some(version.trim().to_owned());
    }
    let module = std::fs::read_to_string(torch.join("version.py")).ok()?;
    let line = module
        .lines()
        .find(|line| line.starts_with("__version__ = "))?;
    line.split(['\'', '"']).nth(1).map(str::to_owned)
}

/// Returns the library directories of the torch that `LIBTORCH` names and of the one that `python3` imports, and what to
/// say about `python3` if it imports none.
fn candidates() -> (Vec<Candidate>, Option<String>) {
    let named = std::env::var_os("LIBTORCH").map(|torch| Candidate {
        name: "LIBTORCH",
        dir: PathBuf::from(torch).join("lib"),
    });
    let mut candidates: Vec<_> = named.into_iter().collect();
    let script = "import importlib.util as u; s = u.find_spec('torch'); \
                  print(s.submodule_search_locations[0] if s else '')";
    let output = Command::new("python3").args(["-c", script]).output();
    let said = match output {
        Err(_) => Some("python3 was not found".to_owned()),
        Ok(output) => match String::from_utf8_lossy(&output.stdout).trim() {
            "" => Some("python3 has no torch".to_owned()),
            torch => {
                candidates.push(Candidate {
                    name: "the torch of python3",
                    dir: Path::new(torch).join("lib"),
                });
                None
            }
        },
    };
    (candidates, said)
}

/// Puts `dir` before the directories of `LD_LIBRARY_PATH`.
fn with_dir(dir: &Path) -> OsString {
    let mut path = dir.as_os_str().to_owned();
    if let Some(given) = std::env::var_os("LD_LIBRARY_PATH").filter(|given| !given.is_empty()) {
        path.push(":");
        path.push(given);
    }
    path
}

/// Libraries that come with PyTorch's wheel or with those that pip installs beside it.
fn is_torchs(library: &str) -> bool {
    [
        "libtorch",
        "libc10",
        "libshm",
        "libcu",
        "libnv",
        "libamdhip",
        "libhip",
        "libroc",
    ]
    .iter()
    .any(|start| library.starts_with(start))
}

/// Says which libraries the program misses, where they were looked for, and what to do.
fn text(program: &Path, found: &LoaderAnswer, tried: &[String]) -> String {
    let (torchs, systems): (Vec<&String>, Vec<&String>) =
        found.missing.iter().partition(|name| is_torchs(name));
    let mut lines = vec![format!("cannot start: {}", tried[0])];
    let mut say = |line: String| lines.push(format!("  {line}"));
    for attempt in &tried[1..] {
        say(attempt.clone());
    }
    if !systems.is_empty() {
        let packages: Vec<_> = systems.iter().map(|name| package(name)).collect();
        say(format!("install {}", packages.join(" and ")));
    }
    if !found.too_old.is_empty() {
        say("this system's libraries are older than those of the machine that built trainer: build it here, or on an older system".to_owned());
    }
    if !torchs.is_empty() || (systems.is_empty() && found.too_old.is_empty()) {
        let bin = program.parent().unwrap_or(program).display().to_string();
        let dirs = INSTALLED.replace("$ORIGIN", &bin);
        say(format!(
            "trainer needs libtorch of PyTorch {TORCH}; it was looked for in LD_LIBRARY_PATH, {dirs}, LIBTORCH and the torch of python3"
        ));
        say(format!(
            "install it: pip install 'torch=={TORCH}.*' (in the environment whose python3 is first in PATH)"
        ));
        say("or name an installed one: export LIBTORCH=.../site-packages/torch".to_owned());
        if Path::new(FETCH).exists() {
            say(format!(
                "or fetch its CPU part (545 MB): sudo {FETCH} /usr/lib/libtorch"
            ));
        }
    }
    lines.join("\n")
}

/// Names a system library and, if it is known, its package.
fn package(library: &str) -> String {
    let known = [
        ("libgomp.so.1", "libgomp1"),
        ("libstdc++.so.6", "libstdc++6"),
        ("libgcc_s.so.1", "libgcc-s1"),
        ("libnuma.so.1", "libnuma1"),
    ];
    match known.iter().find(|(name, _)| *name == library) {
        Some((_, package)) => format!("{library} (Debian and Ubuntu: apt install {package})"),
        None => format!("the package of your distribution that contains {library}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loaded(list: &str, complaints: &str) -> LoaderAnswer {
        parse(&[list.to_owned(), complaints.to_owned()])
    }

    #[test]
    fn a_missing_library_is_named_with_what_installs_it() {
        let found = loaded(
            "\tlibtorch_cpu.so => not found\n\tlibc10.so => not found\n\tlibgomp.so.1 => not found\n\tlibc.so.6 => /lib/libc.so.6 (0x7f)\n\tlibc10.so => not found\n",
            "",
        );
        assert_eq!(
            found.missing,
            ["libtorch_cpu.so", "libc10.so", "libgomp.so.1"]
        );
        let said = text(Path::new("/opt/bin/t"), &found, &[refusal(&found).unwrap()]);
        for part in [
            "cannot start: not found: libtorch_cpu.so, libc10.so, libgomp.so.1\n",
            "apt install libgomp1",
            "/opt/bin/../lib/libtorch/torch/lib",
            "pip install 'torch==2.11.*'",
            "export LIBTORCH=",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
        let found = loaded("\tlibstdc++.so.6 => not found\n", "");
        let said = text(Path::new("/opt/bin/t"), &found, &[refusal(&found).unwrap()]);
        assert!(
            said.contains("apt install libstdc++6") && !said.contains("pip"),
            "{said}"
        );
    }

    #[test]
    fn libraries_that_are_too_old_or_of_another_torch_are_refused() {
        let complaint =
            "/opt/t: /lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by /opt/t)";
        let found = loaded("\tlibc.so.6 => /lib/libc.so.6 (0x7f)\n", complaint);
        assert_eq!(refusal(&found).unwrap(), complaint);
        let dir = tempfile::tempdir().unwrap();
        let list = format!(
            "\tlibtorch_cpu.so => {}/lib/libtorch_cpu.so (0x7f)\n",
            dir.path().display()
        );
        // Nothing tells the version of a libtorch without these files.
        assert_eq!(refusal(&loaded(&list, "")), None);
        for (version, fits) in [("2.11.0+cu130", true), ("2.1.0", false), ("2.12.1", false)] {
            let module = format!("debug = False\n__version__ = '{version}'\n");
            std::fs::write(dir.path().join("version.py"), module).unwrap();
            let refusal = refusal(&loaded(&list, ""));
            assert_eq!(refusal.is_none(), fits, "{refusal:?}");
        }
    }

    #[test]
    fn the_version_is_that_of_the_libtorch_that_is_fetched() {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/fetch-libtorch.py");
        let script = std::fs::read_to_string(script).unwrap();
        assert!(script.contains(&format!("\nTORCH = \"{TORCH}.")));
        let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/torch/build.rs");
        assert!(std::fs::read_to_string(build).unwrap().contains(INSTALLED));
    }
}
