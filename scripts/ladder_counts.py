#!/usr/bin/env python3
"""Compares the counts of the workshop's versions.

    scripts/ladder_counts.py try LADDER VERSION [--ptx]    prints the counts of `make try L=LADDER V=VERSION` after the checks: the version and
                                                           the previous one
    scripts/ladder_counts.py page --nvcc NVCC [LADDER...]  writes dev/cuda/ladder_counts.md, as `make count` does: every version of every ladder, or only
                                                           of these ladders; the page keeps the others
    scripts/ladder_counts.py compare [LADDER...]           the emulator's accesses and the interpreter's; the last line is "N equal, M differ"

The programs are build/race/dev/cuda/LADDER, whose emulator counts loads, stores and warp operations, and build/ptx/dev/cuda/LADDER, which interprets
nvcc's PTX. `make` builds them.
"""

import argparse
import csv
import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = "dev/cuda/ladder_counts.md"
EMULATOR, INTERPRETER = "build/race/dev/cuda/", "build/ptx/dev/cuda/"
PIPES = "pipes"
# Columns with a meaningful sum over a version's kernels; * launches if a column is for one launch.
ACCESSES = ["loads", "stores", "shared loads", "shared stores", "requests", "sectors", "wavefronts", "conflicts", "barriers"]
GPUS = ["H100 us", "H200 us", "A100 us", "RTX 4090 us"]
RANGE = 2 / 3, 3 / 2  # measured / predicted time, for nine of ten versions: dev/emulator/gpu_model.md


def ladders():
    return sorted(path.stem for path in Path("dev/cuda").glob("*.cu") if path.stem != "timing")


def for_hopper(ladder):
    """True if only the interpreter has the ladder's instructions."""
    return "hopper" in ladder


def ideas(ladder):
    """Returns the description of each version in the ladder's file."""
    listed = re.search(r"\.ideas = \{(.*?)\}\}", Path(f"dev/cuda/{ladder}.cu").read_text(), re.DOTALL)[1]
    return ["".join(re.findall(r'"([^"]*)"', idea)) for idea in re.split(r'(?<="),\s', listed)]


def rows(command, tree="."):
    """Returns dictionaries of a program's --csv; a column such as `bound` is joined to its left neighbour, which it qualifies."""
    done = subprocess.run([*command, "--count", "--csv"], cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.stderr or f"{' '.join(command)}: exit code {done.returncode}")
    lines = list(csv.reader(done.stdout.splitlines()))
    for line in lines[1:]:
        row = dict(zip(lines[0], line))
        for n, name in enumerate(lines[0]):
            if name in GPUS:
                row[name] = line[n]
        yield row


def emulated(ladder, version, tree="."):
    """Returns the sums of a version over its kernels, without nvcc."""
    total, active, executed = dict.fromkeys(ACCESSES, 0), 0.0, 0
    operations = {}
    for row in rows([EMULATOR + ladder, str(version)], tree):
        for column in ACCESSES:
            total[column] += int(row[column])
        for name, count in re.findall(r"(\S+) (\d+)", row["operations"]):
            operations[name] = operations.get(name, 0) + int(count)
        here = sum(int(row[c]) for c in ACCESSES[:4]) + sum(int(n) for n in re.findall(r" (\d+)", row["operations"]))
        executed, active = executed + here, active + here * float(row["active"])
    return total | operations | {"active lanes": active / max(executed, 1)}


def interpreted(ladder, version, tree="."):
    """Returns the sums of a version over its launches, from nvcc's PTX."""
    total = {"instructions": 0, "requests": 0, "sectors": 0, "wavefronts": 0, "conflicts": 0, "barriers": 0, "registers": 0}
    pipes, threads = {}, 0.0
    times = dict.fromkeys(GPUS, 0.0)
    for row in rows([INTERPRETER + ladder, str(version)], tree):
        launches = int(row["launches"])
        total["instructions"] += launches * int(row["warp inst."])
        total["sectors"] += round(launches * int(row["requests"]) * float(row["per req."]))
        for column in ("requests", "wavefronts", "conflicts", "barriers"):
            total[column] += launches * int(row[column])
        if row["registers"] != "-":
            total["registers"] = max(total["registers"], int(row["registers"]))
        for name, count in re.findall(r"(\S+) (\d+)", row[PIPES]):
            pipes[name] = pipes.get(name, 0) + launches * int(count)
        threads += launches * int(row["warp inst."]) * float(row["active"])
        for gpu in GPUS:
            times[gpu] += launches * float(row[gpu]) if row[gpu] != "-" else 0.0
    return total | {"active lanes": threads / max(total["instructions"], 1)}, pipes, times


def change(before, now):
    if before == now:
        return "the same"
    return "new" if not before else f"{100 * (now - before) / before:+.0f} %" if now < 3 * before else f"x {now / before:.3g}"


def cell(value):
    return f"{value:.1f}" if isinstance(value, float) else f"{value:,}".replace(",", " ")


def print_table(title, heads, columns):
    """Returns a row for each name with a value other than zero."""
    print(f"\n{title:<24}" + "".join(f"{head:>16}" for head in heads))
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name, 0) for column in columns]
        if any(values):
            print(f"  {name:<22}" + "".join(f"{cell(v):>16}" for v in values) + (f"{change(*values):>12}" if len(values) == 2 else ""))


def compare_with_the_one_before(ladder, version, ptx):
    versions = [v for v in (version - 1, version) if v >= 1]
    heads = [f"version {v}" for v in versions]
    if not ptx:
        columns = [emulated(ladder, v) for v in versions]
        return print_table("the emulator's accesses", heads, columns)
    counts = [interpreted(ladder, v) for v in versions]
    print_table("nvcc's PTX, interpreted", heads, [c for c, _, _ in counts])
    print_table("instructions by kind", heads, [p for _, p, _ in counts])
    print("\npredicted, not measured")
    for gpu in GPUS:
        ranges = [f"{times[gpu] * RANGE[0]:.1f} to {times[gpu] * RANGE[1]:.1f}" for _, _, times in counts]
        print(f"  {gpu:<22}" + "".join(f"{r:>16}" for r in ranges))


# ---- the page --------------------------------------------------------------------------------------------------------------------


def step(before, now):
    """Returns a line with the gains of a version over its predecessor."""
    said = [f"{name} {change(before[name], now[name])}" for name in ("instructions", "sectors", "wavefronts", "conflicts", "barriers", "us")
            if before[name] != now[name]]
    return ", ".join(said) or "the same"


def page(version_of_nvcc, sections):
    return f"""# Gains of each version of a ladder

After this page you can say which count each step of a ladder changed, and by how much.

`make count` wrote it, with nvcc {version_of_nvcc}: the PTX interpreter ran every version of each ladder at its small shape, in bf16 where there is one, and summed its launches.
Counts are exact (sectors to a hundredth of one per request). us is the time on an H100 by the model of [gpu_model.md](../emulator/gpu_model.md): **not measured**, and to be read as a range from
two thirds to one and a half of it. Measured times are in [benchmarks.md](../../docs/benchmarks.md#gpus). Conflicts are the wavefronts beyond the least number, caused by different words
of one bank. `make try L=rope V=3` counts a version that you have just edited.

How to read a step: the effect of a version's idea is in the column of its bottleneck.

- rope 3 has as many sectors as before but half the instructions; reduce 3 has fewer barriers.
- attention_forward 5 has half the barriers (and copies in flight, which only show in the time), attention_forward 6 a fifth fewer sectors.
- matmul 4 takes four steps at once, which show in four columns: tensor cores (instructions), slabs of bf16 instead of float (wavefronts), swizzled tiles (conflicts), and slabs of 32
  values of depth instead of 16 (barriers). The conflicts of matmul 3 are loads of 16 bytes that are the same in several quarters of a warp; a GPU may serve these at once.
- attention_backward 5 includes two kernels that earlier versions leave to the harness or do not have, delta and the sum of the splits; it gains time in the longest block.
- classifier 5 shows in no column: it has fewer exponentials (a fifth of the special-function instructions, a tenth of the float instructions), but more integer instructions and barriers.
  `--count` lists instructions by kind.
- attention_hopper 2 halves the sectors and has no barriers; 3 and 4 order the same work differently. At the timed shape they take 10 and 4 % less time by prediction; at this small shape a turn costs
  as much as it gains.
- hopper_copy 2 leaves address computation to TMA (instructions); hopper_copy 3 has no conflicts, at the cost of an xor in each address.
- hopper_matmul 2 also saves instructions, 3 saves barriers, 4 and 5 save sectors. Queued products only show in the time, and only in part, because in the model shared memory limits the
  tensor cores in all versions.
""" + "".join(sections[ladder] for ladder in sorted(sections))


def section(ladder):
    text = (f"\n## {ladder}\n\n| version | idea | instructions | sectors | wavefronts | conflicts | barriers | us | against the previous version |\n|"
            + "---|" * 9 + "\n")
    before = None
    for version, idea in enumerate(ideas(ladder), 1):
        counts, _, times = interpreted(ladder, version)
        now = counts | {"us": times[GPUS[0]]}
        if not now["instructions"]:
            text += f"| {version} | {idea} | | | | | | | a library's kernel |\n"
            continue
        cells = [cell(now[name]) for name in ("instructions", "sectors", "wavefronts", "conflicts", "barriers", "us")]
        text += f"| {version} | {idea} | " + " | ".join(cells) + f" | {step(before, now) if before else ''} |\n"
        before = now
    return text


def sections_of(path):
    return {part.split()[1]: "\n" + part for part in re.split(r"\n(?=## )", path.read_text())[1:]} if path.exists() else {}


def compare(names):
    equal = differ = 0
    for ladder in names:
        for version in range(1, len(ideas(ladder)) + 1):
            ours, theirs = emulated(ladder, version), interpreted(ladder, version)[0]
            if not theirs["instructions"]:
                continue
            near = {"sectors": 0.006 * theirs["requests"]}  # the interpreter prints two digits per request
            different = [f"{name} {cell(ours[name])} and {cell(theirs[name])}"
                         for name in ("requests", "sectors", "wavefronts", "conflicts", "barriers")
                         if abs(ours[name] - theirs[name]) > near.get(name, 0)]
            equal, differ = equal + (not different), differ + bool(different)
            print(f"{ladder} {version}: " + (", ".join(different) or "equal"), flush=True)
    print(f"{equal} equal, {differ} differ")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("try")
    one.add_argument("ladder")
    one.add_argument("version")
    one.add_argument("--ptx", action="store_true")
    whole = commands.add_parser("page")
    whole.add_argument("--nvcc", required=True)
    whole.add_argument("ladder", nargs="*")
    commands.add_parser("compare").add_argument("ladder", nargs="*")
    args = parser.parse_args()
    os.chdir(Path(__file__).resolve().parents[1])
    if args.command == "try":
        version = len(ideas(args.ladder)) if args.version == "shipped" else int(args.version)
        compare_with_the_one_before(args.ladder, version, args.ptx)
    elif args.command == "compare":
        compare(args.ladder or [ladder for ladder in ladders() if not for_hopper(ladder)])
    else:
        release = subprocess.run([args.nvcc, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout
        known = {ladder: text for ladder, text in sections_of(Path(PAGE)).items() if ladder in ladders()}
        counted = {ladder: section(ladder) for ladder in args.ladder or ladders()}
        Path(PAGE).write_text(page(re.search(r"release (\S+),", release)[1], known | counted))


if __name__ == "__main__":
    main()
