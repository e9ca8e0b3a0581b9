"""The file that owner.sh leaves to be sent back: which results and logs are in it, and what is replaced in them.

Nothing goes in but text that was searched for names of the machine and its users, paths, addresses and identifiers.
"""

import dataclasses
import getpass
import io
import json
import os
import pathlib
import re
import socket
import tarfile

# What goes in, below the directory of results, if it is there.
FILES = ("*.log", "parts.json", "check/log.txt", "scale/scale.json", "table/results.json", "table/*/log", "table/*/run.toml")

# Of a log: its end, where errors are.
LOG_BYTES_MAX = 1 << 20

ABOUT = """Results of trainer/bench/owner.sh.

summary.json   machine, versions, how each part ended, the rows of the training table, the drive's rates
row.md         the row for the table "On owners' machines" of docs/benchmarks.md
*.log          what each part printed, with its last {kib} KiB
the others     results and logs of the parts; table/*/run.toml is what was trained

Replaced in all of it: names of host and users (HOST, USER), paths (DRIVE, OUT, REPO, PYTHON, HOME, PATH), network addresses (ADDRESS),
identifiers of devices and file systems (ID). The environment, the list of processes and the drive's serial number were not read.
"""

# Paths that say nothing about an owner.
PUBLIC = re.compile(r"/(proc|sys)(/|$)|/dev/[a-z]+[0-9a-z]*$|/(usr|lib|lib64|opt/rocm)(/|$)")
PATH = re.compile(r"(?<![\w./])/(?!/)[^\s\"'`,;:()\[\]<>|]+")
ADDRESS = re.compile(r"\b(?!127\.0\.0\.1\b|0\.0\.0\.0\b)(?:\d{1,3}\.){3}\d{1,3}\b|(?<![\w:])(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{1,4}(?![\w:])")
ID = re.compile(r"\b(?:GPU-)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")


@dataclasses.dataclass
class Packed:
    path: pathlib.Path
    size_bytes: int
    names: list


def names_of_machine():
    """Names of this host and of the user, each with the word that stands for it; not those that say nothing."""
    hosts = {socket.gethostname(), os.uname().nodename}
    hosts |= {name.split(".")[0] for name in hosts}
    users = {os.environ.get(key, "") for key in ("USER", "LOGNAME", "SUDO_USER")}
    try:
        users.add(getpass.getuser())
    except (KeyError, OSError):
        pass
    return {**dict.fromkeys(users - {"", "root"}, "USER"), **dict.fromkeys(hosts - {"", "localhost"}, "HOST")}


def scrubbed(text, paths, names):
    """The text without what names the machine, its owner or a place on it."""
    # A path before those that it lies in.
    for path, word in sorted(paths.items(), key=lambda one: -len(one[0])):
        text = re.sub(rf"(?<![\w./]){re.escape(path)}(?![\w-])", word, text)
    text = PATH.sub(lambda match: match[0] if PUBLIC.match(match[0]) else "PATH", text)
    for name, word in sorted(names.items(), key=lambda one: -len(one[0])):
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", word, text, flags=re.IGNORECASE)
    return ADDRESS.sub("ADDRESS", ID.sub("ID", text))


def pack(out, summary, row, paths):
    """Writes the file into `out`."""
    names = names_of_machine()
    texts = {
        "README.txt": ABOUT.format(kib=LOG_BYTES_MAX >> 10),
        "summary.json": json.dumps(summary, indent=1) + "\n",
        "row.md": f"| {' | '.join(row)} |\n",
    }
    for path in sorted({path for pattern in FILES for path in out.glob(pattern) if path.is_file()}):
        texts[str(path.relative_to(out))] = path.read_bytes()[-LOG_BYTES_MAX:].decode(errors="replace")
    path = out / "offloadd-owner.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in texts.items():
            content = (text if name == "README.txt" else scrubbed(text, paths, names)).encode()
            # Without owner and time, which a file on disk would bring.
            about = tarfile.TarInfo(f"offloadd-owner/{name}")
            about.size, about.mode = len(content), 0o644
            archive.addfile(about, io.BytesIO(content))
    return Packed(path, path.stat().st_size, list(texts))
