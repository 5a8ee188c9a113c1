"""Counts instructions and memory accesses of the shipped kernels in the PTX interpreter, and writes dev/cuda/gpu_counts.md, or checks that no count grew.

    scripts/gpu_counts.py --nvcc NVCC PROGRAM...               part of `make count`; the programs are build/ptx/dev/cuda/*
    scripts/gpu_counts.py --nvcc NVCC --check PROGRAM...       the last line is "N passed, M failed", with a test per kernel and shape
    scripts/gpu_counts.py --nvcc NVCC --measured PROGRAM...    writes the table of dev/emulator/gpu_model.md: measured times (docs/benchmarks.md) and predictions

A check fails on more sectors per request, more bank conflicts, more spilled bytes, or a longer predicted time on one of the GPUs. The counts are
exact and equal on all machines, but another version of nvcc may generate different code; then nothing is checked.
"""

import argparse
import csv
import itertools
import math
import os
import re
import subprocess
import sys

PAGE = "dev/cuda/gpu_counts.md"
MODEL, BENCHMARKS = "dev/emulator/gpu_model.md", "docs/benchmarks.md"
MEASURED_ON = "H200 us"  # the column for the GPU of the table "The workshop" in the benchmarks
SAMPLE, PATIENCE = "16", 150  # interpreted blocks per launch; time limit per version in seconds
# In addition to each ladder's own shape: attention of Qwen2.5-0.5B and of Llama-3-8B, half a head group of it; weights in 8 bits.
SHAPES = {
    "attention_forward": ["2048x1x1x2048x14x2x64", "2048x2x1x2048x14x2x64"],
    "attention_backward": ["1024x1x1x1024x14x2x64"],
    "dequantise": ["8x128x4096"],
}
COLUMNS = ["what", "kernel", "blocks", "registers", "spilled", "occupancy", "warp inst.", "active", "Mflop", "requests", "per req.", "kB read",
           "kB written", "kB L2", "wavefronts", "conflicts", "barriers"]
GPUS = ["H100 us", "H200 us", "A100 us", "RTX 4090 us"]
WORSE = ["spilled", "per req.", "conflicts", *GPUS]  # columns in which a larger number is worse


def nvcc_version(nvcc):
    return re.search(r"release (\S+),", subprocess.run([nvcc, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout)[1]


def rows_of(program):
    """Yields a dictionary for each launch of the shipped version, at each shape."""
    name = os.path.basename(program)
    for shape in [None, *SHAPES.get(name, [])]:
        command = [program, "shipped", "--count", "--csv", *(["--shape", shape] if shape else [])]
        header, *lines = csv.reader(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines())
        for line in lines:
            row = dict(zip(header, line))
            row["what"] = f"{name} {shape}" if shape else name
            for gpu in GPUS:
                row[gpu] = f"{row[gpu]} {line[header.index(gpu) + 1]}"
            yield {column: row[column] for column in COLUMNS + GPUS}


def measured():
    """Yields for each op its shape, and the microseconds of each version."""
    for op, shape, times in re.findall(r"^\| (\w+) \| (\w+)[^|]* \| ([0-9 ,*]+) \|", open(BENCHMARKS).read(), re.MULTILINE):
        yield op, shape, [float(t.replace(" ", "").strip("*")) for t in times.split(", ")]


def predicted(program, version, shape):
    """Returns the predicted time of a version, and the bound of its longest launch; None if the interpreter takes too long, or for cuBLASLt."""
    command = [program, str(version), "--count", "--csv", "--sample", SAMPLE, "--shape", shape]
    try:
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=PATIENCE).stdout
    except subprocess.TimeoutExpired:
        return None
    header, *lines = csv.reader(output.splitlines())
    at, launches = header.index(MEASURED_ON), header.index("launches")
    times = [(float(line[at]) * int(line[launches]), line[at + 1]) for line in lines]
    return (sum(us for us, _ in times), max(times)[1]) if times else None


def comparison(programs):
    """Returns a summary and the table of measured and predicted times."""
    table = "| op, shape | version 1, 2, ...: predicted us | predicted / measured | bound |\n|---|---|---|---|\n"
    ratios, last, right, wrong, left_out = [], [], 0, 0, []
    for op, shape, times in measured():
        program = next((p for p in programs if os.path.basename(p) == op), None)
        known, cells = [], []
        for version, us in enumerate(times, 1) if program else []:
            found = predicted(program, version, shape)
            if not found:
                left_out.append(f"{op} {version}")
                cells.append(("-", "-", "-"))
                continue
            ratios.append(found[0] / us)
            print(f"{op} {version}: {us:.0f} us measured, {found[0]:.0f} predicted, {found[1]}", file=sys.stderr, flush=True)
            known.append((us, found[0]))
            cells.append((f"{found[0]:.0f}", f"{ratios[-1]:.2f}", found[1]))
        if known:
            table += f"| {op}, {shape} | " + " | ".join(", ".join(column) for column in zip(*cells)) + " |\n"
            last.append(ratios[-1])
        for (us, by_model), (other, other_by_model) in itertools.combinations(known, 2):
            right += (us < other) == (by_model < other_by_model)
            wrong += (us < other) != (by_model < other_by_model)

    def near(ratios, factor):
        return sum(abs(math.log(r)) < math.log(factor) for r in ratios)

    return (f"Of {len(ratios)} versions {near(ratios, 1.25)} are within a factor of 1.25, {near(ratios, 1.5)} within 1.5; of the last versions of the ops {near(last, 1.25)} of "
            f"{len(last)} are within 1.25. Of {right + wrong} pairs of versions of the same op {wrong} are ranked wrongly."
            + (f" Not predicted, because they are too slow to interpret or call cuBLASLt: {', '.join(left_out)}." if left_out else "") + "\n\n" + table)


def write_comparison(programs):
    new = "<!-- measured -->\n" + comparison(programs) + "<!-- end -->"
    text = re.sub("<!-- measured -->.*<!-- end -->", lambda _: new, open(MODEL).read(), flags=re.DOTALL)
    open(MODEL, "w").write(text)


def page(rows, version):
    text = f"""# Counts of the shipped kernels

After this page you can look up the instructions and bytes of each shipped kernel's launch, and its predicted time on a GPU.

`make count` wrote it, with nvcc {version}: the PTX interpreter ran the last version of each ladder, in bf16 where there is one. **No time was measured**:
times are predictions of the model in [gpu_model.md](../emulator/gpu_model.md), each with the limiting unit; [their accuracy](../emulator/gpu_model.md#compared-with-a-gpu). Registers, spilled bytes and
occupancy are ptxas's for sm_90. `make test-all` fails if sectors per request, conflicts, spilled bytes or a predicted time grow.

"""
    header = COLUMNS + GPUS
    text += "| " + " | ".join(header) + " |\n|" + "---|" * len(header) + "\n"
    for row in rows:
        text += "| " + " | ".join(f"`{row[c]}`" if c == "kernel" else row[c] for c in header) + " |\n"
    return text


def read_page():
    """Returns the version of nvcc, and the rows by (what, kernel, blocks)."""
    text = open(PAGE).read()
    table = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    header, _, *lines = table
    rows = [dict(zip(header, line)) for line in lines]
    return re.search(r"with nvcc ([0-9.]+):", text)[1], {key(row): row for row in rows}


def key(row):
    return row["what"], row["kernel"], row["blocks"]


def number(cell):
    first = cell.split()[0]
    return float(first) if first != "-" else 0.0


def what_is_worse(row, known):
    """Returns a sentence for each figure that got worse."""
    if known is None:
        return ["the page has no such row"]
    return [f"{column} is {row[column]}, and was {known[column]}" for column in WORSE if number(row[column]) > number(known[column])]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvcc", required=True)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--measured", action="store_true")
    parser.add_argument("programs", nargs="+")
    args = parser.parse_args()
    if args.measured:
        return write_comparison(args.programs)
    version = nvcc_version(args.nvcc)
    if args.check:
        written, known = read_page()
        if written != version:
            print(f"skipped: {PAGE} was written with nvcc {written}, and this is {version}\n0 passed, 0 failed")
            return 0
    rows = [row for program in args.programs for row in rows_of(program)]
    if not args.check:
        open(PAGE, "w").write(page(rows, version))
        return 0
    failed = 0
    for row in rows:
        worse = what_is_worse(row, known.get(key(row)))
        failed += bool(worse)
        for sentence in worse:
            print(f"FAILED: {row['what']}, {row['kernel']}: {sentence}\n  fix: find the change that caused it; if it is worth the cost, make count")
    print(f"{len(rows) - failed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
