#!/usr/bin/env python3
"""Draws one step of a timeline (trainer train --trace FILE) as a picture: what was under way when, and what it waited for.

    trainer/bench/timeline.py trace.json --out step.svg                 the step in the middle of the recorded ones
    timeline.py trace.json --step 5 --title "four drives" --out step.svg

Each row is one track over the step's time. Filled: how many of it were under way at a time, of the most that were. Reads and writes
have GB/s written beside them, the mean over the step. The last line says for which share of the step the GPU, or the processor
that stands for it, computed nothing, and what was under way meanwhile.
"""

import argparse
import gzip
import json
import pathlib
from xml.sax.saxutils import escape

# Tracks from what is waited for to what waits.
TRACKS = ["compute", "gather and scatter", "copies", "collectives", "reads", "writes", "updates", "commits"]
BINS = 400
WIDTH, ROW, LEFT, RIGHT, TOP = 900, 44, 150, 240, 56
COLORS = {
    "compute": "#2f6f4f",
    "gather and scatter": "#8a6d3b",
    "copies": "#6a4c93",
    "collectives": "#a23b72",
    "reads": "#1f6fb2",
    "writes": "#c8553d",
    "updates": "#5b8c2a",
    "commits": "#444444",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=pathlib.Path)
    parser.add_argument("--step", type=int, help="its number; the middle one otherwise")
    parser.add_argument("--title", default="")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    opener = gzip.open if args.trace.suffix == ".gz" else open
    with opener(args.trace, "rt") as file:
        spans = [event for event in json.load(file) if event["ph"] == "X"]
    steps = [span for span in spans if span["cat"] == "steps"]
    if not steps:
        parser.error(f"{args.trace}: it records no step")
    named = {int(span["name"].split()[1]): span for span in steps}
    number = args.step if args.step is not None else sorted(named)[len(named) // 2]
    if number not in named:
        parser.error(f"{args.trace}: it has steps {sorted(named)}, not {number}")
    begin = named[number]["ts"]
    step = Step(begin, begin + named[number]["dur"], spans)
    title = " ".join(filter(None, [args.title, f"step {number}, {step.seconds:.3f} s"]))
    args.out.write_text(step.svg(title))
    print(f"{title}: {step.idle_words()}")


class Step:
    """The spans of one step, cut to it."""

    def __init__(self, begin, end, spans):
        self.seconds = (end - begin) / 1e6
        self.bins = {track: [0.0] * BINS for track in TRACKS}
        self.bytes = dict.fromkeys(TRACKS, 0)
        width = (end - begin) / BINS
        for span in spans:
            track, start, stop = span["cat"], max(span["ts"], begin), min(span["ts"] + span["dur"], end)
            if track not in self.bins or stop <= start:
                continue
            # A span that crosses the step's edge counts with its part within.
            self.bytes[track] += span["args"].get("bytes", 0) * (stop - start) / max(span["dur"], 1e-3)
            first, last = int((start - begin) / width), min(int((stop - begin) / width), BINS - 1)
            for at in range(first, last + 1):
                within = min(stop, begin + (at + 1) * width) - max(start, begin + at * width)
                self.bins[track][at] += max(within, 0.0) / width

    def idle(self):
        """Share of the step in which nothing computed, and of that the shares in which each other track was under way."""
        idle = [at for at, busy in enumerate(self.bins["compute"]) if busy < 0.5]
        others = {track: sum(self.bins[track][at] >= 0.5 for at in idle) / max(len(idle), 1) for track in TRACKS[2:]}
        return len(idle) / BINS, others

    def idle_words(self):
        share, others = self.idle()
        under_way = ", ".join(f"{track} {part:.0%}" for track, part in others.items() if part >= 0.05)
        return f"nothing computed for {share:.0%} of the step; meanwhile: {under_way or 'nothing else'}"

    def svg(self, title):
        shown = [track for track in TRACKS if any(self.bins[track])]
        height = TOP + len(shown) * ROW + 48
        out = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + LEFT + RIGHT}" height="{height}" font-family="sans-serif" font-size="13">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="{LEFT}" y="26" font-size="16">{escape(title)}</text>',
        ]
        for row, track in enumerate(shown):
            base = TOP + (row + 1) * ROW - 8
            most = max(self.bins[track])
            points = [f"{LEFT + at * WIDTH / BINS:.1f},{base - value / most * (ROW - 14):.1f}" for at, value in enumerate(self.bins[track])]
            shape = f"{LEFT},{base} " + " ".join(points) + f" {LEFT + WIDTH},{base}"
            out.append(f'<text x="{LEFT - 10}" y="{base - 6}" text-anchor="end">{track}</text>')
            out.append(f'<polygon points="{shape}" fill="{COLORS[track]}" fill-opacity="0.75"/>')
            out.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{base}" y2="{base}" stroke="#bbb"/>')
            words = f"at most {most:.0f} at a time" if most >= 1.5 else ""
            if track in ("reads", "writes", "copies") and self.bytes[track]:
                words = f"{self.bytes[track] / self.seconds / 1e9:.1f} GB/s" + (f", {words}" if words else "")
            out.append(f'<text x="{LEFT + WIDTH + 10}" y="{base - 6}">{words}</text>')
        foot = TOP + len(shown) * ROW + 14
        for tick in range(5):
            x = LEFT + tick * WIDTH / 4
            out.append(f'<text x="{x}" y="{foot}" text-anchor="middle" fill="#555">{self.seconds * tick / 4:.2f} s</text>')
        out.append(f'<text x="{LEFT}" y="{foot + 22}" fill="#333">{escape(self.idle_words())}</text>')
        return "\n".join(out + ["</svg>"]) + "\n"


if __name__ == "__main__":
    main()
