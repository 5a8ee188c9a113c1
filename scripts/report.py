#!/usr/bin/env python3
"""Shows the log of train_llama on a page for a browser, in TensorBoard, in Weights & Biases, or in Trackio.

    %(prog)s out/a/log.jsonl                                a page without references to the network, out/a/report.html
    %(prog)s out/a/log.jsonl out/b/log.jsonl --html ab.html several runs, to compare
    %(prog)s out/a/log.jsonl --tensorboard runs --follow    then: tensorboard --logdir runs
    %(prog)s out/a/log.jsonl --wandb PROJECT --follow       WANDB_MODE=offline keeps it on this machine
    %(prog)s out/a/log.jsonl --trackio PROJECT --follow     then: trackio show

These packages get every number under its name in the log; `make deps` does not install them. train_llama --report_to starts this script. --follow
reads until the run has ended (its log then has a summary), or until Ctrl-C. A resumed run continues the same curves; if it repeats steps, their first
values stay. TensorBoard's files can be written again; the newest file counts.
"""
import argparse
import html
import importlib
import io
import json
import math
import os
import re
import signal
import statistics
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import plot

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data"))
from errors import DataError  # noqa: E402
from program import Parser, run  # noqa: E402
from whole_file import refuse_other_file, whole_file  # noqa: E402

GENERATOR = '<meta name="generator" content="report.py of train_llama">'

# keys of a step without a panel of their own: counters, or keys drawn in another panel
WITHOUT_PANEL = {"step", "epoch", "samples", "tokens", "target_tokens", "step_s", "skipped", "peak_mem_min",
                 *(key for _, _, keys in plot.RANK_PANELS for key in keys)}
POLL_SECONDS = 5
ANSWERS = 8  # that a page shows
SPIKE_WINDOW, SPIKE_SETTLED, SPIKE_DEVIATIONS = 100, 20, 6
INK = "#123456"  # becomes the page's text colour, which follows the browser's light or dark


class Run(NamedTuple):
    path: str
    about: dict  # the first line of the log, which describes the run
    steps: list
    evaluations: list
    written: datetime


def read_run(path):
    steps, evaluations = plot.read_log(path)
    return Run(path, plot.describing(plot.read_lines(path)), steps, evaluations, datetime.fromtimestamp(os.path.getmtime(path)).astimezone())


# ---- the page -------------------------------------------------------------------------------------------------------------------------


def count(n):
    return f"{n:,.0f}".replace(",", "\u202f") if plot.is_number(n) else "–"


def hours(seconds):
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def size(n):
    return "–" if not plot.is_number(n) else f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"


def figures(entries, key):
    """Returns the numbers of a key, with their steps."""
    return [(step, value) for step, value in zip(*plot.series(entries, key)) if not math.isnan(value)]


def step_time(run):
    """Returns the seconds and the tokens of all steps, and true if every step was logged. A step without a line counts as the next one."""
    seconds, tokens, exact = 0, 0, True
    every = run.about.get("options", {}).get("logging_steps", 1)
    every = 1 if not plot.is_number(every) else every if every >= 1 else math.ceil(every * run.steps[-1]["step"])  # a share of all steps
    before = max(0, run.steps[0]["step"] - every)
    for entry in run.steps:
        number, before = entry["step"] - before, entry["step"]
        exact &= number == 1
        seconds += number * entry.get("step_s", 0)
        tokens += number * entry.get("step_s", 0) * entry.get("tok_s", 0)
    return seconds, tokens, exact


def spikes(steps):
    """Returns the steps that llmc/train/spikes.h counts as spikes, if every step is logged."""
    found, mean, variance = [], 0, 0
    for n, (step, loss) in enumerate(figures(steps, "loss"), 1):
        if n > SPIKE_SETTLED and loss > mean + SPIKE_DEVIATIONS * math.sqrt(variance):
            found.append((step, loss))
        share, d = 1 / min(n, SPIKE_WINDOW), loss - mean
        mean += share * d
        variance = (1 - share) * (variance + share * d * d)
    return found


def summary(run):
    """Returns the column of a run in the table: {row: cell}."""
    last, about = run.steps[-1], run.about
    seconds, tokens, exact = step_time(run)
    speeds = [speed for _, speed in figures(run.steps, "tok_s")]
    losses, evaluations = figures(run.steps, "loss"), figures(run.evaluations, "eval_loss")
    best = min(evaluations, key=lambda pair: pair[1], default=None)
    rewards, high = figures(run.steps, "reward"), spikes(run.steps)
    best_reward = max(figures(run.evaluations, "eval_reward"), key=lambda pair: pair[1], default=None)
    of_policy = {"reward, first and last": f"{rewards[0][1]:.4g}, {rewards[-1][1]:.4g}"} if rewards else {}
    of_policy |= {"best evaluation": f"reward {best_reward[1]:.4g} at step {count(best_reward[0])}"} if best_reward else {}
    return of_policy | {
        "steps": f"{count(last['step'])} of {count(about.get('steps'))}",
        "samples": count(last.get("samples")),
        "tokens": count(last.get("tokens")),
        "target tokens": count(last.get("target_tokens")),
        "time of the steps, h:mm:ss": ("" if exact else "about ") + hours(seconds),
        "tokens per second, mean": count(tokens / seconds if seconds else None),
        "tokens per second, median": count(statistics.median(speeds) if speeds else None),
        "peak memory": size(max((value for _, value in figures(run.steps, "peak_mem")), default=None)),
        "planned": size(about.get("planned_peak_mem")),
        "loss, first and last": f"{losses[0][1]:.4g}, {losses[-1][1]:.4g}" if losses else "–",
        **({"best evaluation": f"loss {best[1]:.4g} at step {count(best[0])}" if best else "none"} if not rewards else {}),
        "skipped steps": count(last.get("skipped")),
        "loss spikes": f"{len(high)}, first to {high[0][1]:.4g} at step {count(high[0][0])}" if high else "none",
    }


def heading(run):
    about, model = run.about, run.about.get("model", {})
    when = f"log last written {run.written:%Y-%m-%d %H:%M %Z}"
    if not about:
        return f"the log does not begin with a description of the run; {when}"
    data, name = about.get("data", {}), about.get("options", {}).get("model") or model.get("dir")
    trained = f", of which {count(model.get('trained'))} are trained" if model.get("trained", model.get("parameters")) != model.get("parameters") else ""
    return (f"task {about.get('task')}; {model.get('family')} with {count(model.get('parameters'))} parameters{trained}"
            f"{', ' + name if name else ''}; data {data.get('name') or data.get('path')}; on {about.get('device')}, "
            f"{about.get('threads')} threads per rank; world {about.get('world')}, dp {about.get('dp')}, sp {about.get('sp')}; {when}")


def table(names, rows):
    """Makes a table. names: headings of the columns, unused for a single column; rows: {name: one text for each column}."""
    head = "<tr><th></th>" + "".join(f"<th>{html.escape(name)}</th>" for name in names) + "</tr>\n" if len(names) > 1 else ""
    body = [f"<tr><th>{html.escape(row)}</th>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
            for row, cells in rows.items()]
    return f"<table>\n{head}" + "\n".join(body) + "\n</table>"


def options_of(runs):
    """Returns the rows of a table, first the rows with differences between the runs."""
    options = [run.about.get("options", {}) for run in runs]
    rows = {}
    for key in dict.fromkeys(key for one in options for key in one):
        values = [one.get(key, "–") for one in options]
        rows[key] = [value if isinstance(value, str) else json.dumps(value) for value in values]
    return dict(sorted(rows.items(), key=lambda row: len(set(row[1])) == 1))


def panels_of(runs):
    """Returns the panels of the picture, memory, and a panel for each other number that the steps of this task have."""
    policies = plot.POLICY_PANELS if any("reward" in entry for run in runs for entry in run.steps) else []
    panels = [*policies, *plot.PANELS, ("peak_mem", "peak memory (GiB)", 2**30)]
    known = WITHOUT_PANEL | {key for key, _, _ in panels}
    rest = dict.fromkeys(key for run in runs for entry in run.steps for key in entry if isinstance(entry[key], (int, float)))
    return panels + [(key, key, 1) for key in rest if key not in known]


def curves(runs):
    style = dict.fromkeys(["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"], INK)
    style |= {"legend.facecolor": "none", "svg.fonttype": "none", "text.parse_math": False}
    panels = []
    with plot.pyplot().rc_context(style):
        for drawing in plot.drawings({run.path: (run.steps, run.evaluations) for run in runs}, panels_of(runs)):
            text = io.StringIO()
            figure = plot.figure_of([drawing], 1)
            figure.savefig(text, format="svg", transparent=True, metadata=dict.fromkeys(["Creator", "Date", "Format", "Type"]))
            plot.pyplot().close(figure)
            svg = text.getvalue()
            panels.append(svg[svg.index("<svg"):].replace(INK, "currentColor"))  # leaves out the XML header, which refers to a web site
    return "\n".join(panels)


def answers(run):
    """Returns sampled answers of a policy, from the first to the last batch."""
    sampled = [entry for entry in run.steps if "answer" in entry]
    shown = [sampled[i * (len(sampled) - 1) // (ANSWERS - 1)] for i in range(ANSWERS)] if len(sampled) > ANSWERS else sampled
    rows = {f"step {count(entry['step'])}": [f"reward {entry['answer']['reward']}\n{entry['answer']['prompt']}\n→ {entry['answer']['text']}"] for entry in shown}
    return f'<h2>Answers of {html.escape(plot.name_of(run.path))}</h2>\n<div class="answers">{table([""], rows)}</div>\n' if rows else ""


def page(runs):
    names = [plot.name_of(run.path) for run in runs]
    sums = [summary(run) for run in runs]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{GENERATOR}
<meta name="viewport" content="width=device-width">
<title>{html.escape(", ".join(names))}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }}
table {{ border-collapse: collapse; }}
th, td {{ text-align: left; vertical-align: top; padding: 0.1rem 1rem 0.1rem 0; border-bottom: 1px solid #8886; overflow-wrap: normal; }}
th {{ font-weight: 600; }}
td {{ font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }}
.answers th {{ white-space: nowrap; }}
.answers td {{ white-space: pre-wrap; }}
.curves {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); }}
svg {{ width: 100%; height: auto; }}
</style>
</head>
<body>
<h1>{html.escape(", ".join(names))}</h1>
{"".join(f"<p><b>{html.escape(name)}</b>: {html.escape(heading(run))}</p>" for name, run in zip(names, runs))}
{table(names, {row: [one.get(row, "–") for one in sums] for row in dict.fromkeys(row for one in sums for row in one)})}
<h2>Curves</h2>
<div class="curves">
{curves(runs)}
</div>
{"".join(answers(run) for run in runs)}<h2>Options</h2>
{table(names, options_of(runs))}
</body>
</html>
"""


def write_page(runs, out):
    text = page(runs)
    try:
        refuse_other_file("--html", out, GENERATOR.encode())
        with whole_file(out) as file:
            file.write(text.encode())
    except OSError as error:
        raise DataError(f"cannot write {out}: {error.strerror}", "--html FILE.html") from None


# ---- TensorBoard and W&B --------------------------------------------------------------------------------------------------------------


def entries_as_they_come(path, follow):
    """Yields the steps and evaluations of a log in order, each once. With follow it waits for further lines until the run has ended."""
    lines, last = [], {"step": 0, "evaluation": 0}
    while True:
        before, lines = lines, plot.read_lines(path)
        if len(before) > 1 and lines[0] != before[0]:
            raise DataError(f"{path} is now the log of another run", "start the report again")
        known = next((i for i, (old, new) in enumerate(zip(before, lines)) if old != new), min(len(before), len(lines)))
        for entry in plot.entries_of(lines[known:]):
            kind = "evaluation" if "eval_loss" in entry else "step"
            if plot.is_step(entry) and entry["step"] > last[kind]:
                last[kind] = entry["step"]
                yield entry
        if not follow or any("summary" in entry for entry in plot.entries_of(lines[-2:])):
            return
        time.sleep(POLL_SECONDS)


def numbers(entry):
    return {key: value for key, value in plot.numbers(entry).items() if key != "step"}


def missing(package):
    return DataError(f"--{package} needs the package {package}, which this Python does not have", f"{sys.executable} -m pip install {package}")


def write_tensorboard(folder, entries):
    try:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise missing("tensorboard") from None
    try:
        writer = EventFileWriter(str(folder), flush_secs=POLL_SECONDS)
    except OSError as error:
        raise DataError(f"cannot write {folder}: {error.strerror}", "--tensorboard DIR") from None
    # makes TensorBoard forget the values of older files from step 0 on
    writer.add_event(Event(wall_time=time.time(), step=0, session_log=SessionLog(status=SessionLog.START)))
    try:
        for entry in entries:
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in numbers(entry).items()]
            writer.add_event(Event(wall_time=time.time(), step=entry["step"], summary=Summary(value=values)))
    finally:
        writer.close()


def write_tracker(package, project, name, about, entries):
    """package: wandb, or trackio, which has the same functions."""
    try:
        tracker = importlib.import_module(package)
    except ImportError:
        raise missing(package) from None
    try:
        run = tracker.init(project=project, name=name, config=about)
    except getattr(tracker, "Error", OSError) as error:
        raise DataError(f"{package}: {error}", "for W&B: wandb login, or WANDB_MODE=offline") from None
    try:
        for entry in entries:
            run.log(numbers(entry), step=entry["step"])
    finally:
        run.finish()


def report(args):
    names = [plot.name_of(path) for path in args.log]
    if len(set(names)) < len(names):
        raise DataError(f"two of the runs have the same name: {', '.join(names)}", "name their directories differently")
    elsewhere = args.tensorboard or args.wandb or args.trackio
    if args.follow and (len(args.log) > 1 or not elsewhere):
        raise DataError("--follow is for one log, and for TensorBoard, W&B or Trackio", "add --tensorboard DIR, --wandb PROJECT or --trackio PROJECT")
    if not elsewhere:
        out = args.html or Path(args.log[0]).parent / "report.html"
        write_page([read_run(path) for path in args.log], out)
        return print(out)
    for path, name in zip(args.log, names):
        if not args.follow:
            plot.read_log(path)  # refuses a log without steps
        entries = entries_as_they_come(path, args.follow)
        if args.tensorboard:
            folder = Path(args.tensorboard) / re.sub(r"^\.+|/", "_", name)  # a name of --run_name may have slashes
            write_tensorboard(folder, entries)
            print(folder)
        else:
            write_tracker("wandb" if args.wandb else "trackio", elsewhere, name, plot.describing(plot.read_lines(path)), entries)


def main():
    parser = Parser(prog=os.environ.get("CALLED_AS"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", nargs="+", help="log.jsonl of a run")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--html", metavar="FILE", help="the page to write (default: report.html next to the first log)")
    where.add_argument("--tensorboard", metavar="DIR", help="write event files into DIR/RUN")
    where.add_argument("--wandb", metavar="PROJECT", help="log to Weights & Biases, each log as a separate run")
    where.add_argument("--trackio", metavar="PROJECT", help="log to Trackio, each log as a separate run")
    parser.add_argument("--follow", action="store_true", help="continue until the run ends")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # train_llama ends the script this way
    try:
        report(parser.parse_args())
    except DataError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    run(main)
