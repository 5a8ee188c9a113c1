#!/usr/bin/env python3
"""Draws the log of train_llama: loss (and evaluation loss), learning rate, gradient norm and tokens per second over the steps. For a policy that
learns from rewards: reward, length of answers, divergence from the reference, and entropy.

    %(prog)s out/demo/log.jsonl --out loss.png
    %(prog)s out/a/log.jsonl out/b/log.jsonl       several runs, to compare

A curve with hundreds of points is drawn faintly, with a running mean over a fiftieth of the points on top. A run on several ranks has two
more panels, both stacked: the time of a step by phase, and the bytes sent between ranks.
"""
import argparse
import itertools
import json
import math
import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data"))
from errors import DataError  # noqa: E402
from json_yaml import read_text  # noqa: E402
from program import Parser, run  # noqa: E402
from whole_file import refuse_other_file, whole_file  # noqa: E402

PANELS = [("loss", "loss", 1), ("lr", "learning rate", 1), ("grad_norm", "gradient norm, before clipping", 1),
          ("tok_s", "tokens per second", 1)]
POLICY_PANELS = [("reward", "reward", 1), ("response_length", "tokens of an answer", 1), ("kl", "KL divergence from the reference, nats per token", 1),
                 ("entropy", "entropy, nats per token", 1)]
RANK_PANELS = [("seconds a step", 1, {"compute_s": "computing", "comm_s": "waiting for ranks", "optimizer_s": "optimizer"}),
               ("MB sent a step, by all ranks", 1e6, {"sent_kv": "keys and values", "sent_dkv": "their gradients",
                                                      "sent_grads": "gradients of parameters", "sent_params": "parameters", "sent_experts": "rows of experts"})]


MOST_BYTES = 1 << 30  # of a log
LARGEST = 1e38  # number that can be drawn


def read_lines(path):
    try:
        return read_text(path, MOST_BYTES, "replace").split("\n")
    except DataError as error:
        raise DataError(error.what, "give the log.jsonl of a run's --output_dir") from None


def entries_of(lines):
    """Returns the lines of a log as objects, without a line truncated by a crash."""
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            yield entry


def is_number(value):
    """True if a value can be drawn. The log of a run has such numbers alone; null stands for nan."""
    return isinstance(value, (int, float)) and abs(value) <= LARGEST


def is_step(entry):
    return isinstance(entry.get("step"), int) and 0 <= entry["step"] < 2**53


def numbers(entry):
    return {key: value for key, value in entry.items() if is_number(value)}


def read_log(path):
    """Returns the lines of steps and the lines of evaluations."""
    steps, evaluations = [], []
    for entry in entries_of(read_lines(path)):
        if is_step(entry) and "sample" not in entry:
            answer = {"answer": entry["answer"]} if isinstance(entry.get("answer"), dict) else {}
            (evaluations if "eval_loss" in entry else steps).append(numbers(entry) | answer)
    if not steps:
        raise DataError(f"{path}: contains no steps", "give the log.jsonl of a training run with at least one step")
    return steps, evaluations


def series(entries, key):
    """Returns steps and values. A value that is not a number in the log (null) becomes a gap."""
    return [entry["step"] for entry in entries], [entry.get(key, math.nan) for entry in entries]


def running_mean(values, window):
    """Returns the mean of each value and up to window / 2 neighbours on either side, without gaps."""
    half = window // 2
    sums = [0, *itertools.accumulate(0 if math.isnan(v) else v for v in values)]
    counts = [0, *itertools.accumulate(not math.isnan(v) for v in values)]
    means = []
    for i in range(len(values)):
        begin, end = max(0, i - half), min(len(values), i + half + 1)
        near = counts[end] - counts[begin]
        means.append((sums[end] - sums[begin]) / near if near else math.nan)
    return means


def layers(steps, scale, keys):
    """Returns the start and end of each step on the x axis, and the lower and upper edge of each key's layer in the stack. Gaps count as 0."""
    x = [entry["step"] for entry in steps]
    edges = [x[0] - 0.5] + [(a + b) / 2 for a, b in zip(x, x[1:])] + [x[-1] + 0.5]
    stack, below = [], [0] * len(x)
    for key in keys:
        above = [b + (0 if math.isnan(y) else y / scale) for b, y in zip(below, series(steps, key)[1])]
        stack.append((below, above))
        below = above
    return edges, stack


def describing(lines):
    """Returns the first line of a log, which describes the run."""
    about = next((entry for entry in entries_of(lines[:1]) if "step" not in entry), {})
    return {key: value for key, value in about.items() if isinstance(value, dict) or key not in ("options", "model", "data")}


def name_of(path):
    """Returns --run_name, or the name of the directory."""
    name = describing(read_lines(path)).get("options", {}).get("run_name")
    path = Path(path)
    return isinstance(name, str) and name or (path.parent.name if path.name == "log.jsonl" and path.parent.name else path.stem)


def pyplot():
    try:
        import matplotlib
    except ImportError:
        raise DataError("drawing needs matplotlib, which this Python does not have", "make deps (or: pip install matplotlib)") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot
    return matplotlib.pyplot


def draw_panel(axis, log, key, scale, color, name):
    """Draws a key of the steps and, as a dashed line, the same key of the evaluations."""
    steps, evaluations = log
    x, y = series(steps, key)
    y = [v / scale for v in y]
    window = len(y) // 50
    smooth = window > 2 and key != "lr"
    axis.plot(x, y, color=color, linewidth=0.7 if smooth else 1.5, alpha=0.25 if smooth else 1, marker="." if len(x) == 1 else None,
              label=None if smooth else name)
    if smooth:
        axis.plot(x, running_mean(y, window), color=color, linewidth=1.5, label=name)
    evaluated = [entry for entry in evaluations if "eval_" + key in entry]
    if evaluated:
        axis.plot(*series(evaluated, "eval_" + key), color=color, linestyle="--", marker="o", markersize=4, label=name + ", evaluation")


def draw_panels(axis, logs, key, title, scale):
    for i, (path, log) in enumerate(logs.items()):
        draw_panel(axis, log, key, scale, f"C{i % 10}", name_of(path))
    axis.set_title(title, fontsize=10, loc="left")
    if key in ("tok_s", "peak_mem"):
        axis.set_ylim(0, 1.05 * axis.get_ylim()[1])


def draw_stack(axis, path, steps, title, scale, keys):
    edges, stack = layers(steps, scale, keys)
    for label, (below, above) in zip(keys.values(), stack):
        axis.stairs(above, edges, baseline=below, fill=True, label=label)
    axis.set_title(f"{title}: {name_of(path)}", fontsize=10, loc="left")


def drawings(logs, panels):
    """Returns a function for each panel that draws it on an axis, the panels of ranks last. logs: {path: result of read_log}; panels: (key, title, divisor)."""
    stacks = [partial(draw_stack, path=path, steps=steps, title=title, scale=scale, keys=keys)
              for path, (steps, _) in logs.items() if "comm_s" in steps[0] for title, scale, keys in RANK_PANELS]
    return [partial(draw_panels, logs=logs, key=key, title=title, scale=scale) for key, title, scale in panels] + stacks


def figure_of(drawings, columns):
    rows = -(-len(drawings) // columns)
    figure, axes = pyplot().subplots(rows, columns, figsize=(5.5 * columns, 3.5 * rows), squeeze=False, layout="constrained")
    for axis, drawing in zip(axes.flat, drawings):
        drawing(axis)
        axis.grid(alpha=0.3)
        axis.set_xlabel("step")
        axis.xaxis.get_major_locator().set_params(integer=True)
        if len(axis.get_legend_handles_labels()[1]) > 1:
            axis.legend(fontsize=8)
    for axis in axes.flat[len(drawings):]:
        axis.set_axis_off()
    return figure


def draw(logs, out):
    policies = all(any("reward" in entry for entry in steps) for steps, _ in logs.values())
    figure = figure_of(drawings(logs, POLICY_PANELS if policies else PANELS), 2)
    try:
        refuse_other_file("--out", out, b"Matplotlib")
        with whole_file(out) as file:
            figure.savefig(file, dpi=110, format="png")
    except OSError as error:
        raise DataError(f"cannot write {out}: {error.strerror}", "--out FILE.png") from None


def main():
    parser = Parser(prog=os.environ.get("CALLED_AS"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", nargs="+", help="log.jsonl of a run")
    parser.add_argument("--out", default="plot.png", metavar="FILE.png", help="the picture to write (default plot.png)")
    try:
        args = parser.parse_args()
        draw({path: read_log(path) for path in args.log}, args.out)
    except DataError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print(args.out)
    return 0


if __name__ == "__main__":
    run(main)
