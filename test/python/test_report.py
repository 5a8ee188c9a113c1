"""scripts/report.py: the numbers and curves of its page, which entries reach TensorBoard and W&B, and its refusals."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import report  # noqa: E402
import test_runs  # noqa: E402

ABOUT = {"task": "sft", "options": {"seed": 42, "learning_rate": 1e-4, "logging_steps": 1, "eval_data": "more.jsonl"},
         "device": "cpu", "threads": 2, "world": 4, "dp": 2, "sp": 2, "model": {"family": "llama", "parameters": 1673664, "dir": "a/model"},
         "data": {"path": "chats.safetensors"}, "steps": 4, "planned_peak_mem": 3 * 2**29}


def step(n, **more):
    return {"step": n, "loss": 4 / n, "grad_norm": 1.0, "lr": 1e-4, "samples": 8 * n, "tokens": 700 * n, "target_tokens": 300 * n,
            "tok_s": 100.0, "step_s": 2.0, "mfu": None, "peak_mem": 2**20 * n, "skipped": 0, **more}


def evaluation(n, loss, **more):
    return {"step": n, "eval_loss": loss, **more}


def text_of(lines):
    return "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)


def write_log(folder, lines):
    folder.mkdir(exist_ok=True)
    path = folder / "log.jsonl"
    path.write_text(text_of(lines))
    return path


def run(*arguments):
    return subprocess.run([sys.executable, SCRIPTS / "report.py", *map(str, arguments)], capture_output=True, text=True)


def page_of(*logs):
    return report.page([report.read_run(log) for log in logs])


def rows_of(page):
    """{first cell: the others}, in order."""
    rows = re.findall(r"<tr><th>(.*?)</th>(.*?)</tr>", page.replace("\u202f", " "))
    return {name: re.findall("<t[dh]>(.*?)</t[dh]>", cells) for name, cells in rows}


# ---- the page -------------------------------------------------------------------------------------------------------------------------


def test_numbers_of_the_page(tmp_path):
    log = write_log(tmp_path / "run", [
        ABOUT, step(1, tok_s=100.0, step_s=4000.0), evaluation(1, 2.5), step(2, loss=None, grad_norm=None, tok_s=200.0, skipped=1),
        evaluation(2, 1.25), step(3, tok_s=400.0, skipped=1), evaluation(3, None), '{"step": 4, "lo'])
    done = run(log)
    assert done.returncode == 0 and done.stdout == f"{tmp_path / 'run' / 'report.html'}\n", done.stderr
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    rows = rows_of(page)
    assert {name: rows[name] for name in ("steps", "samples", "tokens", "target tokens", "skipped steps")} == {
        "steps": ["3 of 4"], "samples": ["24"], "tokens": ["2 100"], "target tokens": ["900"], "skipped steps": ["1"]}
    assert rows["time of the steps, h:mm:ss"] == ["1:06:44"]
    assert rows["tokens per second, mean"] == ["100"]  # (100 * 4000 + 200 * 2 + 400 * 2) / 4004 = 100.2
    assert rows["tokens per second, median"] == ["200"]
    assert (rows["peak memory"], rows["planned"]) == (["3.0 MiB"], ["1.50 GiB"])
    assert rows["loss, first and last"] == ["4, 1.333"]
    assert rows["best evaluation"] == ["loss 1.25 at step 2"]
    assert rows["loss spikes"] == ["none"]
    assert (rows["seed"], rows["eval_data"]) == (["42"], ["more.jsonl"])
    for text in ("<h1>run</h1>", "task sft; llama with 1\u202f673\u202f664 parameters, a/model; data chats.safetensors; ",
                 "on cpu, 2 threads a rank; world 4, dp 2, sp 2; log last written 20"):
        assert text in page


def test_the_page_stands_alone(tmp_path):
    page = page_of(write_log(tmp_path / "a<b>&_$c$", [ABOUT, step(1), step(2)]))
    assert set(re.findall(r"https?://[^\"<> ]*", page)) <= {"http://www.w3.org/1999/xlink", "http://www.w3.org/2000/svg"}  # names, not links
    for outside in ("<script", "<link", "<img", "<!DOCTYPE svg", "@import", "src="):
        assert outside not in page
    assert "<h1>a&lt;b&gt;&amp;_$c$</h1>" in page and ">a&lt;b&gt;&amp;_$c$</text>" in page
    assert "color-scheme: light dark" in page and "currentColor" in page and report.INK not in page


# ---- TensorBoard and W&B --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_waiting(monkeypatch):
    polls = iter(range(20))  # a reader that misses the end fails
    monkeypatch.setattr(report.time, "sleep", lambda seconds: next(polls))


def test_follow_through_a_crash_and_a_resume(tmp_path, no_waiting):
    log = write_log(tmp_path, [ABOUT])
    entries = report.entries_as_they_come(log, follow=True)
    before = [ABOUT, step(1), step(2), evaluation(2, 2.0)]
    write_log(tmp_path, [*before, step(3), '{"step": 4, "lo'])
    assert [next(entries) for _ in range(4)] == [*before[1:], step(3)]
    # resumed at step 2; step 3 is done again; 4 is written while the reader looks, and the last evaluation takes a while
    write_log(tmp_path, [*before, step(3, tok_s=99.0), json.dumps(step(4))[:20]])
    with open(log, "a") as file:
        file.write(json.dumps(step(4))[20:] + "\n")
    assert next(entries) == step(4)
    with open(log, "a") as file:
        file.write(text_of([evaluation(4, 1.0)]))
    assert next(entries) == evaluation(4, 1.0)
    with open(log, "a") as file:
        file.write(text_of([{"summary": {"steps": 4}}]))
    assert next(entries, "ended") == "ended"


def test_tensorboard_reads_it(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = write_log(tmp_path / "a", [ABOUT, step(1), step(2, loss=None), evaluation(2, 1.5), step(3)])
    for _ in range(2):  # the second time in place of the first
        done = run(log, "--tensorboard", tmp_path / "tb")
        assert done.returncode == 0, done.stderr
    events = accumulator.EventAccumulator(str(tmp_path / "tb" / "a"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == step(1).keys() - {"step", "mfu"} | {"eval_loss"}
    assert [(e.step, e.value) for e in events.Scalars("samples")] == [(1, 8), (2, 16), (3, 24)]
    assert [e.step for e in events.Scalars("loss")] == [1, 3]
    assert [(e.step, e.value) for e in events.Scalars("eval_loss")] == [(2, 1.5)]


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_tracker_is_given_every_number(monkeypatch, package):
    calls = []
    fake = SimpleNamespace(log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finish"))
    monkeypatch.setitem(sys.modules, package, SimpleNamespace(init=lambda **of_run: calls.append(of_run) or fake, Error=OSError))
    report.write_tracker(package, "project", "a", ABOUT, [{"step": 1, "loss": 2.0, "mfu": None}, {"step": 1, "eval_loss": 3.0}])
    assert calls == [{"project": "project", "name": "a", "config": ABOUT}, (1, {"loss": 2.0}), (1, {"eval_loss": 3.0}), "finish"]


# ---- refusals -------------------------------------------------------------------------------------------------------------------------


def refused(*arguments):
    done = run(*arguments)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith("report.py: ") and len(done.stderr.splitlines()) == 2 and "fix:" in done.stderr
    return done.stderr


def test_refusals(tmp_path):
    assert "missing.jsonl: no such file" in refused(tmp_path / "missing.jsonl")
    good, empty = write_log(tmp_path / "good", [ABOUT, step(1)]), write_log(tmp_path / "empty", [])
    assert "no steps" in refused(empty)
    assert "no steps" in refused(empty, "--tensorboard", tmp_path / "tb")
    assert "no steps" in refused(good, write_log(tmp_path / "begun", [ABOUT]))
    assert "cannot write" in refused(good, "--html", tmp_path / "no" / "such" / "folder.html")
    assert "exists, and is no earlier result" in refused(good, "--html", good)
    assert "the same name: good, good" in refused(good, good)
    assert "--follow is for" in refused(good, "--follow")
    assert "--follow is for one log" in refused(good, empty, "--tensorboard", tmp_path / "tb", "--follow")


def test_a_run_reports_by_itself(tmp_path):
    """All steps are there when the run has ended."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    data = test_runs.write_data(tmp_path / "data.safetensors", test_runs.random_documents(16))
    result = test_runs.call(test_runs.command("sft", data=data, max_len=64, max_steps=3, train_batch_size=4, output_dir=tmp_path / "run", report_to="tensorboard"))
    assert result.returncode == 0 and "note" not in result.stdout, result.stderr
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard" / "run"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is there")
def test_a_run_goes_on_without_the_package(tmp_path):
    data = test_runs.write_data(tmp_path / "data.safetensors", test_runs.random_documents(16))
    result = test_runs.call(test_runs.command("sft", data=data, max_len=64, max_steps=3, train_batch_size=4, output_dir=tmp_path / "run", report_to="wandb"))
    assert result.returncode == 0 and len(test_runs.log_lines(tmp_path / "run")) == 4
    assert "pip install wandb" in result.stderr and "note: the log was not handed on" in result.stdout
