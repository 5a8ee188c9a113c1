#!/usr/bin/env python3
"""Exercises of the workshop: a version to start from, a check, and a solution.

    scripts/exercise.py                     lists them
    scripts/exercise.py rope                prints the task, and writes the version to start from into dev/cuda/rope.cu
    scripts/exercise.py rope --check        builds it, checks it in three orders of threads with races, counts it, and compares with the bound
    scripts/exercise.py rope --solution     replaces the start by the solution: dev/cuda/exercises/rope.patch

A start misses its bound, or its results are wrong. --tree DIRECTORY uses a copy of the sources instead.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

import ladder_counts
import new_version

ROOT = Path(__file__).resolve().parents[1]
EXERCISES = ROOT / "dev/cuda/exercises"


class Exercise:
    """A file of dev/cuda/exercises: lines "start: version N", "bound: COUNT at most NUMBER", "time: ...", the task, the solution's patch.

    If the start is wrong, a line "says: ..." has its check's message, and a patch before the solution's turns the copy into the start.
    """

    def __init__(self, name):
        path = EXERCISES / f"{name}.patch"
        if not path.exists():
            sys.exit(f"there is no exercise {name}\n  fix: use one of {' '.join(names())}")
        self.name, text = name, path.read_text()
        self.text, *patches = re.split(r"^(?=--- a/)", text, flags=re.M)
        self.patch, self.to_start = patches[-1], patches[:-1]
        self.start = int(re.search(r"^start: version (\d+)$", self.text, re.M)[1])
        self.time = re.search(r"^time: (.*)$", self.text, re.M)[1]
        self.says = "".join(re.findall(r"^says: (.*)$", self.text, re.M))
        self.bounds = [(name, int(most)) for name, most in re.findall(r"^bound: ([a-z_ ]+) at most (\d+)$", self.text, re.M)]

    def begin(self, tree):
        version = new_version.Ladder(tree, self.name).add(self.start)
        for patch in self.to_start:
            self.apply(patch, tree)
        return version

    def solve(self, tree):
        self.apply(self.patch, tree)

    def apply(self, patch, tree):
        if not shutil.which("patch"):
            sys.exit("exercise.py needs the program patch\n  fix: make deps")
        done = subprocess.run(["patch", "-p1", "--quiet", "-d", tree], input=patch, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            sys.exit(f"the exercise's patch does not apply to dev/cuda/{self.name}.cu:\n{done.stdout}\n"
                     f"  fix: git checkout dev/cuda/{self.name}.cu, then scripts/exercise.py {self.name}")

    def check(self, tree):
        """Returns the faults of the last version: none if it is right and within the bounds."""
        hopper = ladder_counts.for_hopper(self.name)
        program = (ladder_counts.INTERPRETER if hopper else ladder_counts.EMULATOR) + self.name
        version = len(new_version.Ladder(tree, self.name).launchers)
        built = subprocess.run(["make", program], cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if built.returncode:
            return [built.stdout]
        ran = subprocess.run([program, str(version), *([] if hopper else ["--emu"])], cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if ran.returncode:
            return [ran.stdout]
        counts = ladder_counts.interpreted(self.name, version, tree)[0] if hopper else ladder_counts.emulated(self.name, version, tree)
        return [f"{name}: {counts[name]}, and at most {most} are allowed" for name, most in self.bounds if counts[name] > most]


def names():
    return sorted(path.stem for path in EXERCISES.glob("*.patch"))


def copy_of_sources(to):
    """Makes a tree in which make builds a ladder from a copy of dev/cuda, and everything else from this tree."""
    (to / "dev").mkdir(parents=True)
    shutil.copytree(ROOT / "dev/cuda", to / "dev/cuda")
    for name in ("emulator", "bench"):
        (to / "dev" / name).symlink_to(ROOT / "dev" / name)
    for name in ("Makefile", "checks.mk", "llmc", "test", "scripts", "train_llama.cu", "train_gpt2.cu"):
        (to / name).symlink_to(ROOT / name)
    patterns = ("probe.mk", "flags", "llmc/*.*", "dev/emulator/*.[od]", "dev/emulator/ptx/*.[od]", "dev/cuda/common.[od]")
    objects = [path for pattern in patterns for path in (ROOT / "build").glob(pattern)]
    for path in objects:  # with their times, so that make does not build them again
        copy = to / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--solution", action="store_true")
    parser.add_argument("--tree", type=Path, default=ROOT)
    args = parser.parse_args()
    if not args.name:
        for exercise in map(Exercise, names()):
            print(f"{exercise.name:<18} {exercise.time:<14} {exercise.text.splitlines()[0]}")
        return 0
    exercise = Exercise(args.name)
    if args.check:
        wrong = exercise.check(args.tree)
        print("\n".join(wrong) or "correct, and within the bound")
        return bool(wrong)
    if args.solution:
        exercise.solve(args.tree)
        print(f"dev/cuda/{args.name}.cu has the solution; scripts/exercise.py {args.name} --check")
        return 0
    version = exercise.begin(args.tree)
    print(f"{exercise.text}\nIt is version {version} of dev/cuda/{args.name}.cu. Then: make try L={args.name} V={version}, and "
          f"scripts/exercise.py {args.name} --check")
    return 0


if __name__ == "__main__":
    sys.exit(main())
