#!/usr/bin/env python3
"""Checks the words that people read. Prints each place with what to do.

.ci/words.py [ROOT]     retired words in documents, configurations, packaging, and string literals of the programs' sources;
                        names of types and functions in Rust and Python that do not say what they are
"""

import os
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
    "offloadd/tests/*.md",
    "trainer/bench/io/*.md",
    "trainer/bench/io/*.toml",
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


# Participles that do not end in "ed". One alone says that something was done, and not to what: `Found` of what?
PARTICIPLES = set(
    "Begun Bought Broken Brought Built Chosen Come Cut Done Drawn Fed Found Given Gone Had Held Hidden Kept Known Laid Led Left Lent Lost Made Met Put Ran Said"
    " Seen Sent Shown Spent Stuck Taken Told Torn Won Worn Written".split()
)

# Functions whose name says neither what they do nor with what.
VAGUE = "of|take|look|tell|hear|come|bring|together|places?"

# Names that are allowed, each with its reason: (crate or package, name).
ALLOWED = {
    ("trainer/python/python/offloadd", "Lion"): "`offloadd.optim.Lion` keeps its state itself, `_lion.Lion` has the rule; both stand for `lion_pytorch.Lion`",
}

# The package, whose classes have names of their own. Scripts and tests beside it define small models again and again.
PACKAGE = "trainer/python/python/offloadd"


def identifier_faults(root, allowed=ALLOWED):
    """Returns a line for each type or function in Rust or Python whose name does not say what it is."""
    faults, types, used = [], {}, set()
    for path, crate in sources_of(root):
        name, rust = str(path.relative_to(root)), path.suffix == ".rs"
        text = path.read_text()
        for match in re.finditer(rf"^[^\n/#\"]*\b(?:fn|def) ({VAGUE})\b", text, re.MULTILINE):
            if (crate, match[1]) in allowed:
                used.add((crate, match[1]))
            else:
                place = (name, line_of(text, match.start(1)))
                faults.append((*place, f"{match[1]}: name the function for what it does, with its object: from_path, next_piece"))
        if not rust and not name.startswith(PACKAGE + "/"):
            continue
        # Where tests begin; names in them may be those of the code that they test.
        end = 0 if is_test(path.relative_to(root)) or "examples" in path.parts else len(text.split("\n#[cfg(test)]\nmod ")[0])
        for match in re.finditer(TYPE if rust else r"^class (\w+)", text, re.MULTILINE):
            place = (name, line_of(text, match.start(1)))
            if (crate, match[1]) in allowed:
                used.add((crate, match[1]))
            elif is_participle(match[1].lstrip("_")):
                faults.append((*place, f"{match[1]}: a participle alone: name the type for what it holds"))
            elif match.start() < end and match[1] in types.setdefault(crate, {}):
                first = ":".join(map(str, types[crate][match[1]]))
                faults.append((*place, f"{match[1]}: the name of another type of {crate} ({first}): name both for what tells them apart"))
            elif match.start() < end:
                types[crate][match[1]] = place
    gone = [f".ci/words.py: {crate} has no {name}: take it out of ALLOWED" for crate, name in allowed if (crate, name) not in used]
    return [f"{name}:{number}: {what}" for name, number, what in sorted(faults)] + gone


# Types of a file: not those in functions and macros, nor associated ones.
TYPE = r"^(?:pub(?:\([^)]*\))? )?(?:unsafe )?(?:struct|enum|trait|type|union) (\w+)"


def is_participle(name):
    return name in PARTICIPLES or re.fullmatch(r"[A-Z][a-z]+ed", name) is not None


def line_of(text, at):
    return text.count("\n", 0, at) + 1


def sources_of(root):
    """Yields the Rust and Python files below `root`, each with its crate: the nearest directory with a Cargo.toml. The package is one too."""
    crates = {}
    for place, dirs, files in os.walk(root):
        dirs[:] = sorted(name for name in dirs if name == ".ci" or not name.startswith(".") and name not in ("target", "node_modules", "__pycache__"))
        below = pathlib.Path(place)
        own = "Cargo.toml" in files or below == root / PACKAGE
        crates[below] = below.relative_to(root).as_posix() if own else crates.get(below.parent, ".")
        yield from ((below / name, crates[below]) for name in sorted(files) if name.endswith((".rs", ".py")))


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
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[1]).resolve()
    found = faults(root) + identifier_faults(root)
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(1 if found else 0)
