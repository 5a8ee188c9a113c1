#!/usr/bin/env python3
"""Writes the tables of docs/porting.md from llmc/app/foreign.def: the names that belong to OpenRLHF, TRL, accelerate and Axolotl, and what they are here.

    python3 scripts/porting.py
"""
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "porting.md"
BEGIN, END = "<!-- made by scripts/porting.py -->\n", "<!-- end -->\n"
TITLES = {"IS": "Names of the same thing", "SETS": "Names, or values of them, that stand for a flag of ours", "PART": None,
          "TOGETHER": "Names that count together", "NO": "What is refused, and what to do instead", "NOTE": "What has no meaning here: a line says why"}
OWNERS = {"OPENRLHF": "OpenRLHF", "TRL": "TRL", "AXOLOTL": "Axolotl", "ACCELERATE": "accelerate"}


def lines():
    """(owners, names, values, answer, text) of each line of NAMES."""
    source = (ROOT / "llmc/app/foreign.def").read_text()
    string = r'"((?:[^"\\]|\\.)*)"'
    found = re.findall(rf"^NAMES\(([A-Z |]+), {string}, {string}, ([A-Z]+), {string}\)$", source, re.M)
    return [(whose.split(" | "), names.split(","), [v for v in values.split(",") if v], answer, text)
            for whose, names, values, answer, text in found]


def values():
    """(flag, theirs, ours) of each line of VALUE."""
    return re.findall(r"^VALUE\((\w+), ([^,]+), ([^)]+)\)$", (ROOT / "llmc/app/foreign.def").read_text(), re.M)


def answer_of(answer, text):
    if answer in ("IS", "SETS"):
        return f"`--{text}`"
    return f"one number of `--{text.split()[0]}`" if answer == "PART" else text


def tables():
    parts = []
    for answer, title in TITLES.items():
        if title:
            parts += [f"### {title}", "", "| of | there | here |", "|---|---|---|"]
        else:
            parts.pop()  # the rows go on
        for whose, names, accepted, kind, text in lines():
            if kind == answer:
                with_values = f": {', '.join(f'`{value}`' for value in accepted)}" if accepted else ""
                parts.append(f"| {', '.join(OWNERS[w] for w in whose)} | {', '.join(f'`{name}`' for name in names)}{with_values} | {answer_of(kind, text)} |")
        parts.append("")
    parts += ["### Values", "", "| flag | there | here |", "|---|---|---|"]
    parts += [f"| `--{flag}` | `{theirs}` | `{ours}` |" for flag, theirs, ours in values()]
    return "\n".join([*parts, ""])


def main():
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(before + BEGIN + tables() + END + after)


if __name__ == "__main__":
    main()
