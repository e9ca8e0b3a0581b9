"""The page that is made from the table: docs/pytorch-behaviour.md."""

from run import lines
from table import HERE, THEMES, TOLERANCE

PAGE = HERE.parents[3] / "docs" / "pytorch-behaviour.md"

# Lines that stand for those of a theme that are equal.
_EXAMPLES = 3

_HEAD = """# A prepared model compared with plain PyTorch

Each entry is a script that the tests run twice: with plain PyTorch, and with its model prepared by `offloadd.prepare`. Both must give the
same values and leave the same weights, or the prepared one is refused with an error that says what to do. `make docs` writes the page from
`trainer/python/tests/semantics/`, where each entry is a line; `run.py --show PART` there runs those with PART in their names. `w` is a weight in
a block, `p` each parameter.

{equal} of {all} entries are equal: the same bits up to the first update, and within {tolerance:g} after it, since torch's AdamW rounds in another order.
{refused} are [refused](#refused), and {differs} [differ on purpose](#different-on-purpose). The state is in host memory (`cpu`), and for {nvme} entries on
drives (`nvme`) too.

[What works and what is refused](pytorch.md#what-works-and-what-is-refused) is the overview.

## Equal
"""


def text():
    """The page."""
    of_kind = {kind: [line for line in lines() if line.kind == kind] for kind in ("equal", "refused", "differs")}
    counts = {kind: len(found) for kind, found in of_kind.items()}
    nvme = sum("nvme" in line.devices for line in lines())
    parts = [_HEAD.format(**counts, all=len(lines()), nvme=nvme, tolerance=TOLERANCE), "| | entries | such as |\n|---|---|---|"]
    for theme in THEMES:
        equal = [line.name for line in theme.lines if line.kind == "equal"]
        parts += [f"| {theme.name} | {len(equal)} | {'; '.join(equal[:_EXAMPLES])} |"] * bool(equal)
    parts += ["\n## Refused\n", "| | what a script does | what the error says |\n|---|---|---|"]
    for theme in THEMES:
        for phrase in dict.fromkeys(line.refused for line in theme.lines if line.refused is not None):
            parts.append(f"| {theme.name} | {_names(theme, lambda line: line.refused == phrase)} | ... {phrase} ... |")
    parts += ["\n## Different on purpose\n", "| plain PyTorch | a prepared model |\n|---|---|"]
    parts += [f"| {line.name} | {line.differs} |" for line in of_kind["differs"]]
    return "\n".join(parts) + "\n"


def _names(theme, wanted):
    return "; ".join(line.name for line in theme.lines if wanted(line))
