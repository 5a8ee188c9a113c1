#!/usr/bin/env python3
"""Tests the tests: switches on each known bug of test/mutants.txt; at least one test must fail.

    scripts/mutants.py --make build/mutants/tree     makes a copy of the sources with all bugs, each behind a switch (test/mutant.h)
    scripts/mutants.py --install NUMBER              puts one bug into the sources, to see which test notices it (docs/book); --remove NUMBER
    scripts/mutants.py [NUMBER...] [--part 1/4]      runs the tests after `make test-mutants` has compiled the copy; from the repository root

test_cuda covers bugs in files for GPUs (.cuh, .cu, but not decoder.cu), and bugs for a suite named Cuda...; these are skipped if test_cuda was not
built (no boost.context). test_ptx covers bugs in the PTX interpreter.

The last line is "N passed, M failed"; a mutant has failed if no test notices it.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

TABLE = "test/mutants.txt"
SOURCES = ["*.cu", "llmc/*/*", "test/*.h", "test/*.cpp", "test/ops/*", "test/cuda/*", "dev/cuda/*.h", "dev/cuda/*.cuh", "dev/cuda/*.cpp", "dev/emulator/*.h", "dev/emulator/*.cpp", "dev/emulator/ptx/*",
           "test/ptx/*.h", "test/ptx/*.cpp"]
TESTS = "build/mutants/test/"


class Mutant(NamedTuple):
    number: int  # 0: always switched on
    file: str
    tests: str
    bug: str
    right: str
    wrong: str

    @property
    def binary(self):
        if self.file.startswith("dev/emulator/ptx/"):
            return TESTS + "test_ptx"
        return TESTS + ("test_cuda" if re.match(r"llmc/(?!model/).*\.cuh?$", self.file) or "Cuda" in self.tests else "test_llmc")


def read_table(path=TABLE):
    mutants = []
    for entry in re.split(r"\n\s*\n", pathlib.Path(path).read_text()):
        lines = [line for line in entry.splitlines() if line.strip() and not line.startswith("#")]
        if not lines:
            continue
        head = [part.strip() for part in lines[0].split("|", 3)]
        right, wrong = ("\n".join(line[2:] for line in lines[1:] if line[0] == mark) for mark in "-+")
        if len(head) < 4 or not re.fullmatch(r"\d+|always", head[0]) or not right or not wrong:
            sys.exit(f'{path}: "{lines[0]}" is not a mutant\n  fix: number | file | tests | bug, then lines with "- " and lines with "+ "')
        mutants.append(Mutant(int(head[0].replace("always", "0")), *head[1:], right, wrong))
    return mutants


def pattern(text):
    return r"\s+".join(map(re.escape, text.split()))


def switched(mutant, right):
    """Returns the text that is right until the mutant is switched on."""
    if mutant.number == 0:
        return mutant.wrong
    in_front = re.fullmatch(r"(.*;)\s*" + pattern(right), mutant.wrong, re.DOTALL)
    if in_front:
        return f"if (mutant({mutant.number})) {{ {in_front[1]} }}\n{right}"
    if re.search(r";\s*(//.*)?$", right):
        return f"{{ if (mutant({mutant.number})) {{\n{mutant.wrong}\n}} else {{\n{right}\n}} }}"
    return f"(mutant({mutant.number}) ? ({mutant.wrong}) : ({right}))"


def mutated(path, source, mutants):
    """Returns the source with all of its mutants."""
    changes = []
    for mutant in mutants:
        found = list(re.finditer(pattern(mutant.right), source))
        if len(found) != 1:
            sys.exit(f"mutant {mutant.number} of {TABLE}: {path} has this text {len(found)} times:\n{mutant.right}\n"
                     "  fix: copy the text from the current file, with enough context to be unique")
        changes.append((found[0].start(), found[0].end(), mutant))
    changes.sort()
    for (_, end, one), (begin, _, other) in zip(changes, changes[1:]):
        if begin < end:
            sys.exit(f"mutants {one.number} and {other.number} of {TABLE} change the same text of {path}\n  fix: shorten the texts")
    for begin, end, mutant in reversed(changes):
        source = source[:begin] + switched(mutant, source[begin:end]) + source[end:]
    return source


def exchange(number, install):
    """Replaces the right text by the wrong text of a mutant, or the wrong one by the right one."""
    mutant = next((m for m in read_table() if m.number == number), None)
    if mutant is None:
        sys.exit(f"{TABLE} has no mutant {number}\n  fix: give one of its numbers")
    path = pathlib.Path(mutant.file)
    before, after = (mutant.right, mutant.wrong) if install else (mutant.wrong, mutant.right)
    source, count = re.subn(pattern(before), lambda _: after, path.read_text())
    if count != 1:
        sys.exit(f"{path} has this text {count} times:\n{before}\n  fix: {f'if the mutant is already applied: --remove {number}' if install else f'git checkout {path}'}")
    path.write_text(source)
    if not install:
        return print(f"{path} is restored")
    test = mutant.binary.replace(TESTS, "build/test/")
    print(f"{path} has mutant {number}: {mutant.bug}\nto detect it: make {test} && {test} --gtest_filter='{mutant.tests}'\nto remove it: scripts/mutants.py --remove {number}")


def make_tree(tree):
    """Rewrites only changed files, so that make rebuilds nothing else."""
    mutants = read_table()
    paths = [path for pattern in SOURCES for path in pathlib.Path(".").glob(pattern) if path.is_file()]
    for mutant in mutants:
        if pathlib.Path(mutant.file) not in paths:
            sys.exit(f"mutant {mutant.number} of {TABLE}: there is no file {mutant.file}\n  fix: name the file that contains the text now")
    copies = {tree / path: mutated(path, path.read_text(), [m for m in mutants if m.file == str(path)]) for path in paths}
    for old in [path for path in tree.rglob("*") if path.is_file() and path not in copies]:
        old.unlink()
    for copy, source in copies.items():
        if not copy.exists() or copy.read_text() != source:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(source)


def run(binary, tests, number=0):
    """Returns "green", "red" or "nothing": the verdict of the filtered tests with this mutant switched on."""
    *settings, filter = tests.split()
    environment = {**os.environ, "LLMC_MUTANT": str(number), "OMP_WAIT_POLICY": "passive", **dict(s.split("=") for s in settings)}
    try:
        process = subprocess.run([binary, "--gtest_filter=" + filter, "--gtest_brief=1"], env=environment, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, text=True, errors="replace", timeout=300)
    except subprocess.TimeoutExpired:
        return "red"
    if process.returncode != 0:
        return "red"  # a failed test or a crash
    return "green" if re.search(r"\[  PASSED  \] [1-9]", process.stdout) else "nothing"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int)
    parser.add_argument("--make", type=pathlib.Path, metavar="TREE")
    parser.add_argument("--install", type=int, metavar="NUMBER")
    parser.add_argument("--remove", type=int, metavar="NUMBER")
    parser.add_argument("--part", default="1/1")
    args = parser.parse_args()
    if args.make:
        return make_tree(args.make)
    if args.install or args.remove:
        return exchange(args.install or args.remove, bool(args.install))

    part, parts = map(int, args.part.split("/"))
    bugs = [mutant for mutant in read_table() if mutant.number]
    mutants = [m for m in bugs[part - 1 :: parts] if os.path.exists(m.binary) and m.number in (args.numbers or [m.number])]
    filters = sorted({(m.binary, m.tests) for m in mutants})
    with ThreadPoolExecutor(2) as pool:
        right = dict(zip(filters, pool.map(lambda f: run(*f), filters)))
        verdicts = pool.map(lambda m: run(m.binary, m.tests, m.number), mutants)
        failures = []
        for mutant, verdict in zip(mutants, verdicts):
            without = right[mutant.binary, mutant.tests]
            said = "noticed" if (without, verdict) == ("green", "red") else f"FAILED: {verdict}, and {without} without it"
            print(f"  mutant {mutant.number:3d}  {said}  {mutant.bug} ({mutant.tests})", flush=True)
            failures += [mutant.bug] if said != "noticed" else []
    for failure in failures:
        print("FAILED: " + failure)
    print(f"{len(mutants) - len(failures)} passed, {len(failures)} failed")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
