"""The tasks report and plot: the page and picture of a log, the entries for TensorBoard, W&B and Trackio, and refusals."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import ENVIRONMENT, PROGRAM, call, command, log_lines  # adds scripts/ to sys.path
import report

ABOUT = {"task": "sft", "options": {"seed": 42, "learning_rate": 1e-4, "logging_steps": 1, "eval_data": "more.jsonl"},
         "device": "cpu", "threads": 2, "world": 4, "dp": 2, "sp": 2, "model": {"family": "llama", "parameters": 1673664, "trained": 4096, "dir": "a/model"},
         "data": {"path": "cache/0123.safetensors", "name": "chats.jsonl"}, "steps": 4, "planned_peak_mem": 3 * 2**29}
CUT = '{"step": 4, "lo'  # the last line of a run that was killed


def step(n, **more):
    return {"step": n, "loss": 4 / n, "grad_norm": 1.0, "lr": 1e-4, "samples": 8 * n, "tokens": 700 * n, "target_tokens": 300 * n,
            "tok_s": 100.0, "step_s": 2.0, "mfu": None, "peak_mem": 2**20 * n, "skipped": 0, **more}


def evaluation(n, loss):
    return {"step": n, "eval_loss": loss}


def text_of(lines):
    return "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)


def write_log(folder, lines):
    folder.mkdir(exist_ok=True)
    path = folder / "log.jsonl"
    path.write_text(text_of(lines))
    return path


def run(task, *arguments):
    return call([str(PROGRAM), task, *map(str, arguments)])


# ---- the page and the picture ---------------------------------------------------------------------------------------------------------


def test_numbers_of_the_page(tmp_path):
    log = write_log(tmp_path / "run", [
        ABOUT, step(1, tok_s=100.0, step_s=4000.0), evaluation(1, 2.5), step(2, loss=None, grad_norm=None, tok_s=200.0, skipped=1),
        evaluation(2, 1.25), step(3, tok_s=400.0, skipped=1), evaluation(3, None), CUT])
    done = run("report", log)
    assert done.returncode == 0 and done.stdout == f"{tmp_path / 'run' / 'report.html'}\n", done.stderr
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    rows = {name: re.findall("<t[dh]>(.*?)</t[dh]>", cells) for name,
            cells in re.findall(r"<tr><th>(.*?)</th>(.*?)</tr>", page.replace("\u202f", " "))}
    assert {name: values[0] for name, values in rows.items()}.items() >= {
        "steps": "3 of 4", "samples": "24", "tokens": "2 100", "target tokens": "900", "skipped steps": "1", "time of the steps, h:mm:ss": "1:06:44",
        "tokens per second, mean": "100",  # (100 * 4000 + 200 * 2 + 400 * 2) / 4004 = 100.2
        "tokens per second, median": "200", "peak memory": "3.0 MiB", "planned": "1.50 GiB", "loss, first and last": "4, 1.333",
        "best evaluation": "loss 1.25 at step 2", "loss spikes": "none", "seed": "42", "eval_data": "more.jsonl"}.items()
    for text in ("<h1>run</h1>", "task sft; llama with 1\u202f673\u202f664 parameters, of which 4\u202f096 are trained, a/model; data chats.jsonl; ",
                 "on cpu, 2 threads per rank; world 4, dp 2, sp 2; log last written 20"):
        assert text in page


def test_the_page_of_a_policy(tmp_path):
    """The reward comes first, and some answers are shown. Panels are separate pictures, which a narrow window puts below each other."""
    about = {**ABOUT, "options": {**ABOUT["options"], "run_name": "of words"}}
    steps = [step(n, reward=n / 64, answer={"prompt": f"copy <{n}>", "text": "a\nb", "reward": None if n == 2 else 0.5}) for n in range(1, 65)]
    logs = [write_log(tmp_path / "run", [about, *steps, {**evaluation(2, -0.5), "eval_reward": 0.5}]), write_log(tmp_path / "sft", [ABOUT, step(1)])]
    page = report.page([report.read_run(log) for log in logs])
    assert "<h1>of words, sft</h1>" in page
    assert re.findall("<tr><th>(.*?)</th><td>(.*?)</td><td>(.*?)</td>", page)[:2] == [("reward, first and last", "0.01562, 1", "–"),
                                                                                   ("best evaluation", "reward 0.5 at step 2", "none")]
    assert page.index(">reward</text>") < page.index(">loss</text>") and page.count("<svg") == page.count(">step</text>") > 4
    assert page.count("\n→ a\nb</td>") == report.ANSWERS and "copy &lt;1&gt;" in page and "copy &lt;64&gt;" in page


def test_the_page_needs_no_other_file_and_no_network(tmp_path):
    page = report.page([report.read_run(write_log(tmp_path / "a<b>&_$c$", [ABOUT, step(1), evaluation(1, 2.0), step(2)]))])
    assert set(re.findall(r"https?://[^\"<> ]*", page)) <= {"http://www.w3.org/1999/xlink", "http://www.w3.org/2000/svg"}  # names of name spaces
    assert not re.search("<script|<link|<img|<!DOCTYPE svg|@import|src=", page)
    assert "<h1>a&lt;b&gt;&amp;_$c$</h1>" in page and ">a&lt;b&gt;&amp;_$c$</text>" in page
    assert "color-scheme: light dark" in page and "currentColor" in page and report.INK not in page


def test_a_picture_of_two_runs(tmp_path):
    lines = [ABOUT, step(1), step(2), evaluation(2, 2.5), {"step": 2, "sample": "It was"}, step(3), CUT]
    logs = [write_log(tmp_path / name, lines) for name in ("a", "b")]
    for _ in range(2):  # the second call replaces the picture
        done = run("plot", *logs, "--out", tmp_path / "both.png")
        assert done.returncode == 0 and (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG"), done.stderr


# The command, in which good, empty and begun are logs, and the message.
@pytest.mark.parametrize("words, message", [
    ("report missing.jsonl", "missing.jsonl: No such file"), ("plot .", "is not a regular file"), ("plot empty", "no steps"), ("plot good begun", "no steps"),
    ("report empty --tensorboard tb", "no steps"), ("report good --html no/folder.html", "cannot write"),
    ("report good --html good", "exists and is not an earlier result"), ("plot good --out good", "exists and is not an earlier result"),
    ("plot", "the following arguments are required: log"), ("report good --html a --wandb b", "not allowed with"),
    ("report good good", "the same name: good, good"), ("report good --follow", "--follow is for")])
def test_refusals(words, message, tmp_path):
    logs = {name: str(write_log(tmp_path / name, lines)) for name, lines in (("good", [ABOUT, step(1)]), ("empty", []), ("begun", [ABOUT]))}
    task, *arguments = words.split()
    done = run(task, *(logs.get(word, word if word.startswith("-") else tmp_path / word) for word in arguments))
    assert done.returncode == 1 and not done.stdout and message in done.stderr
    assert done.stderr.startswith(f"./train_llama {task}: ") and len(done.stderr.splitlines()) == 2 and "fix:" in done.stderr


def test_numbers_that_cannot_be_drawn(tmp_path):
    """A log by another program or with damaged lines: such values are gaps."""
    log = write_log(tmp_path / "run", [
        {"task": 3, "options": [], "model": "m", "data": None, "steps": "many", "planned_peak_mem": 10**400}, step(1), step(10**300), {"step": -1}, {"step": 2**60}, {"step": "2"},
        step(2, loss=10**400, tok_s="fast", step_s=None, peak_mem=[1]), '{"step": 3, "loss": NaN, "lr": -Infinity, "tok_s": 1e999}\n', "[" * 100_000 + "\n", step(4, reward=1e300), "\x00\xff\n",
        {"step": 5, "loss": 1e308}, {"step": 5, "eval_loss": 1e999}])
    for task in ("plot", "report"):
        done = run(task, log, *(["--out", tmp_path / "plot.png"] if task == "plot" else []))
        assert done.returncode == 0 and not done.stderr, done.stderr
    assert "5 of –" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


# ---- TensorBoard and others -----------------------------------------------------------------------------------------------------------


def test_follow_through_a_crash_and_a_resume(tmp_path, monkeypatch):
    polls = iter(range(20))  # a reader that misses the end exhausts these
    monkeypatch.setattr(report.time, "sleep", lambda seconds: next(polls))
    log = write_log(tmp_path, [ABOUT])
    entries = report.entries_as_they_come(log, follow=True)
    before = [ABOUT, step(1), step(2), evaluation(2, 2.0)]
    write_log(tmp_path, [*before, step(3), CUT])
    assert [next(entries) for _ in range(4)] == [*before[1:], step(3)]
    # The run resumes at step 2 and repeats step 3. Step 4 is written while the reader reads, and the last evaluation comes later.
    fourth = text_of([step(4)])
    write_log(tmp_path, [*before, step(3, tok_s=99.0), fourth[:20]])
    for written, entry in ((fourth[20:], step(4)), (text_of([evaluation(4, 1.0)]), evaluation(4, 1.0)),
                           (text_of([{"summary": {"steps": 4}}]), "ended")):
        with open(log, "a") as file:
            file.write(written)
        assert next(entries, "ended") == entry


def test_a_tracker_gets_every_number(monkeypatch):
    calls = []
    fake = SimpleNamespace(log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finish"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **of_run: calls.append(of_run) or fake, Error=OSError))
    report.write_tracker("wandb", "project", "a", ABOUT, [{"step": 1, "loss": 2.0, "mfu": None}, {"step": 1, "eval_loss": 3.0}])
    assert calls == [{"project": "project", "name": "a", "config": ABOUT}, (1, {"loss": 2.0}), (1, {"eval_loss": 3.0}), "finish"]


def test_names_of_runs_in_tensorboard(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(report, "write_tensorboard", lambda folder, entries: written.append(folder))
    for name, folder in {"": "run", "a/b": "a_b", "../up": "__up"}.items():
        log = write_log(tmp_path / "run", [{**ABOUT, "options": {"run_name": name}}, step(1)])
        report.report(SimpleNamespace(log=[log], tensorboard="tb", wandb=None, trackio=None, follow=False))
        assert written.pop() == Path("tb") / folder


def reporting_run(data, output, to, **more):
    return call(command("sft", data=data, max_len=64, max_steps=3, train_batch_size=4, output_dir=output, report_to=to), **more)


def test_a_run_writes_for_tensorboard(data, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = reporting_run(data, tmp_path / "run", "tensorboard")
    assert result.returncode == 0 and "note" not in result.stdout, result.stderr
    events = accumulator.EventAccumulator(str(tmp_path / "run/tensorboard/run")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]


@pytest.mark.parametrize("to, code, said", [
    ("trackio", "def init(project, **_): raise OSError('project ' + project)", "project train_llama\n"),
    ("trackio:mine", "def init(project, **_): raise OSError('project ' + project)", "project mine\n"),
    ("wandb", "raise ModuleNotFoundError", "pip install wandb")])
def test_a_run_continues_if_its_tracker_fails(to, code, said, data, tmp_path):
    (tmp_path / f"{to.partition(':')[0]}.py").write_text(code)
    result = reporting_run(data, tmp_path / "run", to, env={**ENVIRONMENT, "PYTHONPATH": str(tmp_path)})
    assert result.returncode == 0 and len(log_lines(tmp_path / "run")) == 4 and "note: the log was not handed on" in result.stdout
    assert said in result.stderr
