#!/usr/bin/env python3
"""Draws what a program printed on a terminal as an SVG.

    script -qec "trainer runs" /dev/null | docs/pictures/terminal.py '$ trainer runs' > runs.svg

Understands colours and bold (SGR), carriage returns, and a cleared screen: what was before it is left out, and so are progress bars. Long
lines are cut. --from TEXT: begins with the line that starts with TEXT.
"""

import html
import re
import sys

COLOURS = ["#4d4d4d", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2", "#dcdfe4"]
PLAIN, BACK = "#dcdfe4", "#1e2127"
ADVANCE, LINE, MARGIN, COLUMNS = 7.83, 17, 14, 130


def screen(text):
    """The lines that are left on the terminal."""
    text = re.split(r"\x1b\[[23]J", text)[-1]
    text = re.sub(r"\x1b\[\?[\d;]*[a-z]|\x1b\[[\d;]*[A-HJKf]|\x1b\][^\x07]*\x07", "", text)
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n")]
    lines = [line for line in lines if not line.startswith(("\u2588", "\u2591"))]
    while lines and not lines[-1].strip():
        lines.pop()
    return [line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "\u2026" for line in lines]


def spans(line):
    """[(text, colour, bold)] of a line."""
    colour, bold, found = PLAIN, False, []
    for part in re.split(r"(\x1b\[[\d;]*m)", line):
        codes = re.fullmatch(r"\x1b\[([\d;]*)m", part)
        if not codes:
            found += [(part, colour, bold)] if part else []
            continue
        for code in (int(code or 0) for code in codes[1].split(";")):
            if code == 0:
                colour, bold = PLAIN, False
            elif code == 1:
                bold = True
            elif code == 2:
                colour = "#7f848e"
            elif 30 <= code <= 37 or 90 <= code <= 97:
                colour = COLOURS[code % 10]
            elif code == 39:
                colour = PLAIN
    return found


def picture(lines):
    width = max(sum(len(text) for text, _, _ in spans(line)) for line in lines) * ADVANCE + 2 * MARGIN
    height = len(lines) * LINE + 2 * MARGIN
    drawn = []
    for number, line in enumerate(lines):
        bolds = {True: ' font-weight="bold"', False: ""}
        parts = "".join(f'<tspan fill="{colour}"{bolds[bold]}>{html.escape(text, quote=False)}</tspan>' for text, colour, bold in spans(line))
        drawn.append(f'<text x="{MARGIN}" y="{MARGIN + number * LINE + 13}" xml:space="preserve">{parts}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}" '
        f'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="13">\n<rect width="100%" height="100%" rx="6" fill="{BACK}"/>\n'
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    prompt, lines = sys.argv[1:], screen(sys.stdin.read())
    if prompt[:1] == ["--from"]:
        first = next(number for number, line in enumerate(lines) if line.startswith(prompt[1]))
        prompt, lines = prompt[2:], lines[first:]
    sys.stdout.write(picture([f"\x1b[1m{line}\x1b[0m" for line in prompt] + lines))
