"""scripts/plot.py: reading a log, drawing, and refusals."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import plot  # noqa: E402

RUN = {"task": "sft", "options": {}, "steps": 3}


def step(n, **more):
    return {"step": n, "loss": 4 / n, "grad_norm": 1.0, "lr": 1e-4 * n, "tok_s": 100.0, **more}


def write_log(folder, lines, name="log.jsonl"):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def run(*arguments):
    return subprocess.run([sys.executable, SCRIPTS / "plot.py", *map(str, arguments)], capture_output=True, text=True)


def test_steps_and_evaluations_are_told_apart(tmp_path):
    log = write_log(tmp_path, [RUN, step(1), step(2), {"step": 2, "eval_loss": 2.5}, {"step": 2, "sample": "It was"}, step(3), '{"step": 4, "lo'])
    steps, evaluations = plot.read_log(log)
    assert plot.series(steps, "loss") == ([1, 2, 3], [4, 2, 4 / 3])
    assert plot.series(evaluations, "eval_loss") == ([2], [2.5])


@pytest.mark.parametrize("steps", [1, 3, 400])
def test_draws_a_png(tmp_path, steps):
    logs = [write_log(tmp_path / name, [RUN, *map(step, range(1, steps + 1)), {"step": steps, "eval_loss": 1.0}]) for name in ("a", "b")]
    out = tmp_path / "both.png"
    done = run(*logs, "--out", out)
    assert done.returncode == 0, done.stderr
    header = out.read_bytes()[:24]
    assert header.startswith(b"\x89PNG") and min(struct.unpack(">II", header[16:])) > 500


def refused(*arguments):
    done = run(*arguments)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith("plot.py: ") and len(done.stderr.splitlines()) == 2 and "fix:" in done.stderr
    return done.stderr


def test_refusals(tmp_path):
    assert "missing.jsonl: no such file" in refused(tmp_path / "missing.jsonl")
    assert "no steps" in refused(write_log(tmp_path, [RUN, {"eval_loss": 1.0}]))
    assert "no steps" in refused(write_log(tmp_path, ["not a log\n"], "text.jsonl"))
    assert str(tmp_path) in refused(tmp_path)  # a directory
    good = write_log(tmp_path, [RUN, step(1)], "good.jsonl")
    assert "cannot write" in refused(good, "--out", tmp_path / "no" / "such" / "folder.png")
    assert "exists, and is no earlier result" in refused(good, "--out", good)


def test_policies_have_panels_of_their_own(tmp_path):
    steps = [step(n, reward=n / 5, response_length=7.5, kl=0.01 * n, entropy=0.5) for n in range(1, 6)]
    log = write_log(tmp_path / "policy", [RUN, *steps, {"step": 5, "eval_loss": 0, "eval_reward": 0.9}])
    figure = plot.figure_of({log: plot.read_log(log)}, plot.POLICY_PANELS)
    assert [axis.get_title(loc="left") for axis in figure.axes[:3]] == [title for _, title, _ in plot.POLICY_PANELS[:3]]
    reward, evaluated = figure.axes[0].lines
    assert list(reward.get_ydata()) == [0.2, 0.4, 0.6, 0.8, 1.0] and list(evaluated.get_ydata()) == [0.9]
    for _ in range(2):  # the second time the picture is replaced
        assert run(log, "--out", tmp_path / "policy.png").returncode == 0


@pytest.mark.parametrize("name", ["attention_rows", "attention_tile", "ring"])
def test_figures_of_the_docs_are_drawn(name, tmp_path):
    import figures

    getattr(figures, name)().savefig(tmp_path / "figure.png", dpi=20)
