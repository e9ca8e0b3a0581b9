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

Of {offloaded[all]} entries whose parameters are offloaded, {offloaded[equal]} are equal: the same bits up to the first update, and within {tolerance:g} after it,
since torch's AdamW rounds in another order. {offloaded[refused]} are [refused](#refused), and {offloaded[differs]} [differ on purpose](#different-on-purpose). The
parameters are in host memory (`cpu`), for {nvme} entries on drives (`nvme`) too or instead.

Where parameters stay with the model ([device](pytorch.md#devices) `none`), {none[equal]} of {none[all]} entries are equal, {none[refused]} are refused and
{none[differs]} differ. Entries about runs that resume have no such state.

[What works and what is refused](pytorch.md#what-works-and-what-is-refused) is the overview.

## Equal
"""

_KINDS = ("equal", "refused", "differs")


def text():
    """The page."""
    nvme = sum("nvme" in line.devices for line in lines())
    counts = {"offloaded": _counts(map(_offloaded, lines())), "none": _counts(map(_none, lines()))}
    parts = [_HEAD.format(**counts, nvme=nvme, tolerance=TOLERANCE), "| | entries | with `none` | such as |\n|---|---|---|---|"]
    for theme in THEMES:
        equal = [line.name for line in theme.lines if _kind(_offloaded(line)) == "equal"]
        with_none = sum(_kind(_none(line)) == "equal" for line in theme.lines)
        parts += [f"| {theme.name} | {len(equal)} | {with_none} | {'; '.join(equal[:_EXAMPLES])} |"] * bool(equal)
    parts += ["\n## Refused\n", "| | what a script does | what the error says | with `none` |\n|---|---|---|---|"]
    for theme in THEMES:
        of_answer = {}
        for line in theme.lines:
            if "refused" in map(_kind, (_offloaded(line), _none(line))):
                of_answer.setdefault((_answer(_offloaded(line)), _answer(_none(line))), []).append(line.name)
        parts += [f"| {theme.name} | {'; '.join(names)} | {said} | {'the same' if none == said else none} |" for (said, none), names in of_answer.items()]
    parts += ["\n## Different on purpose\n", "| plain PyTorch | a prepared model | with `none` |\n|---|---|---|"]
    parts += [f"| {line.name} | {line.differs} | {'equal' if _kind(_none(line)) == 'equal' else 'the same'} |" for line in lines() if line.kind == "differs"]
    return "\n".join(parts) + "\n"


def _offloaded(line):
    """The line where parameters are offloaded, None if it does not run there."""
    return None if line.devices == ("none",) else line


def _none(line):
    """The line where parameters stay with the model, None if it does not run there."""
    return line.on("none") if "none" in line.devices else None


def _kind(line):
    return None if line is None else line.kind


def _answer(line):
    """What a prepared model does, in a cell of the page."""
    return "" if line is None else line.kind if line.refused is None else f"... {line.refused} ..."


def _counts(found):
    kinds = [line.kind for line in found if line is not None]
    return {"all": len(kinds), **{kind: kinds.count(kind) for kind in _KINDS}}
