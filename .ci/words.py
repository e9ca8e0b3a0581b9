#!/usr/bin/env python3
"""Checks that documents, settings and the programs' texts use no retired words. Prints each place with the word to use.

.ci/words.py [ROOT]     documents, configurations, packaging, and string literals of the programs' sources
"""

import pathlib
import re
import sys

# Regular expressions of retired words, each with the word to use. They match anywhere, in upper or lower case.
RETIRED = {
    # Keys and variables
    r"\bsave_every\b": "checkpoint_every",
    r"\bsaves_kept\b": "checkpoints_kept",
    r"\brun_folder\b": "run_dir",
    r"\bresident_share\b": "resident_fraction",
    r"\bholdout_share\b": "validation_fraction",
    r"\btrain\.keep\b": "train.activation_checkpointing",
    r"\btrain\.tiling\b": "train.mlp_chunks",
    r"\btrain\.activations\b": "offload.activations",
    r"\boffload\.schedule\b": "offload.optimizer_step",
    r"\boffload\.update\b": "offload.optimizer_device",
    r"\boffload\.host_memory\b": "offload.host_memory_bytes",
    r"\bat_once\b": "immediate",
    r"\bmove_bytes_per_s_max\b": "rebalance_bytes_per_s_max",
    r"\brated_tb_written\b": "rated_tbw",
    r"\bOFFLOADD_REMOVED\b": "OFFLOADD_DISABLE",
    r"\bOFFLOADD_MISHAP\b": "OFFLOADD_FAULT",
    # Commands and options
    r"\btrainer keys\b": "trainer config-reference",
    r"\btrainer tokens\b": "trainer preview-data",
    r"\btrainer digest\b": "trainer fingerprint",
    r"\bbench-io paced\b": "bench-io testdrives",
    r"--last-half\b": "--slow-last",
    r"\boffloadd drop\b": "offloadd job delete",
    r"\boffloadd inspect\b": "offloadd job list",
    r"\bgive-up\b": "job discard-unreadable",
    r"\bdevice measure\b": "device calibrate",
    # Words
    r"\bfolders?\b": "directory",
    r"\bnewcomers?\b": "device that is being added",
    r"\blookouts?\b": "peer watchdog",
    r"\ba life of the daemon\b": "an incarnation",
    r"\bmishaps?\b": "injected fault",
    r"\bwhat came of\b": "the result",
    r"\bwritten ever\b": "total written",
    r"\bgo(es|ne)? on from\b": "resume from",
    r"\bmends?\b": "fix",
}

PAGES = [
    "README.md",
    "Makefile",
    "docs/**/*.md",
    "configs/*.toml",
    "configs/*.json",
    "configs/*.sh",
    "offloadd/packaging/**/*",
    "bench-io/measured/*.md",
    "bench-io/measured/*.toml",
    "trainer/bench/*.md",
]
SOURCES = ["*/src/**/*.rs", "*/*/src/**/*.rs"]


def literals(source):
    """Returns [(line, text)] of the string literals in Rust code, without tests."""
    source = source.split("\n#[cfg(test)]\nmod ")[0]
    literal = r'r(?P<hashes>#+)"(?P<raw>.*?)"(?P=hashes)|"(?P<text>(?:\\.|[^"\\])*)"'
    token = r"//[^\n]*|'(?:\\[^']+|[^\\'])'|" + literal
    said = []
    for match in re.finditer(token, source, re.DOTALL):
        text = match["raw"] or match["text"]
        if text:
            said.append((source.count("\n", 0, match.start()) + 1, text))
    return said


def lines_of(path):
    """Returns [(line, text)] of the parts of a file that a user sees."""
    text = path.read_text()
    if path.suffix == ".rs":
        return [(number + index, line) for number, said in literals(text) for index, line in enumerate(said.split("\n"))]
    return list(enumerate(text.splitlines(), 1))


def is_test(path):
    return path.name in ("tests.rs", "docs.rs") or path.name.endswith("_tests.rs") or "tests" in path.parts


def faults(root, retired=RETIRED):
    """Returns a line for each place of a retired word."""
    patterns = {word: re.compile(word, re.IGNORECASE) for word in retired}
    pages = [page for pattern in PAGES for page in sorted(root.glob(pattern)) if page.is_file()]
    sources = [source for pattern in SOURCES for source in sorted(root.glob(pattern)) if not is_test(source.relative_to(root))]
    found = []
    for path in pages + sources:
        name = str(path.relative_to(root))
        for number, line in lines_of(path):
            matches = [(match, word) for word, pattern in patterns.items() if (match := pattern.search(line))]
            found += [f"{name}:{number}: {match[0]}: write {retired[word]}" for match, word in matches]
    return found if pages else [f"{root}: no documents"]


if __name__ == "__main__":
    found = faults(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[1]))
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(1 if found else 0)
