#!/usr/bin/env python3
"""Writes the table of docs/porting.md: the names that belong to OpenRLHF, TRL, accelerate and Axolotl, and the answers that the program gives to them.

    python3 scripts/porting.py
"""
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "porting.md"
BEGIN, END = "<!-- made by scripts/porting.py -->\n", "<!-- end -->\n"


def answers(table):
    """Names, and the strings that follow them, of each line of a table of llmc/app/foreign.h."""
    source = (ROOT / "llmc/app/foreign.h").read_text()
    body = re.search(rf"inline constexpr \w+ {table}\[\] = {{\n(.*?)\n}};", source, re.S)[1]
    lines = [re.findall(r'"([^"]*)"', line) for line in re.findall(r"{(.*?)}", body, re.S)]
    return [(names.split(","), *rest) for names, *rest in lines]


def table():
    rows = [(names, f"`--{flag} {value}`") for names, flag, value in answers("switches")]
    rows += [(names, re.sub(r"^(.*?)(?=, |; |$)", r"`--\1`", answer)) for names, answer in answers("foreign")]
    rows += [(names, f"none: {answer}") for names, answer in answers("refused")]
    return "\n".join(["| there | here |", "|---|---|", *(f"| {', '.join(f'`{name}`' for name in names)} | {answer} |" for names, answer in rows), ""])


def main():
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(before + BEGIN + table() + END + after)


if __name__ == "__main__":
    main()
