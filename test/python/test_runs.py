"""Whole runs of train_llama on the tiny models of test/golden: resuming, stopping, logging, and every way to call it wrong."""

import fcntl
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "data"))

from token_file import TokenFile  # noqa: E402

PROGRAM = ROOT / "train_llama"
GOLDEN = ROOT / "test" / "golden"
FAMILIES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.json") if not path.parent.name.startswith(("gpt2", "lora_")))
DEMO = ROOT / "data" / "demo" / "model"
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # the python3 that runs data/prepare.py
OPTIMIZER = "optimizer-00000-of-00001.safetensors"  # of a checkpoint that one rank wrote
VARYING = ("tok_s", "step_s", "peak_mem", "peak_mem_min", "mfu", "compute_s", "comm_s", "optimizer_s")  # of a log line: time and memory


# ---- data and calls ---------------------------------------------------------------------------------------------------------------

def write_data(path, documents, kind="sft", vocab=96):
    """documents: (ids, mask) each."""
    file = TokenFile(str(path), vocab)
    ids, masks = zip(*documents)
    file.append(np.concatenate(ids), np.concatenate(masks), np.array([len(d) for d in ids]))
    file.write({"kind": kind, "vocab_size": str(vocab)})
    file.close()
    return path


def random_documents(count, seed=0, longest=60):
    """Documents with a pattern to learn; a few have no target, one has a single token."""
    rng = np.random.default_rng(seed)
    documents = []
    for i in range(count):
        n = 1 if i == 3 else int(rng.integers(2, longest + 1))
        ids = (rng.integers(4, 96) + np.cumsum(rng.integers(0, 3, n))) % 92 + 4
        mask = np.zeros(n, np.uint8) if i % 7 == 5 else (rng.random(n) < 0.7).astype(np.uint8)
        mask[0] = 0
        if i % 7 != 5 and n > 1:
            mask[-1] = 1
        documents.append((ids, mask))
    return documents


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "data.safetensors", random_documents(23))


def command(task, *flags, model=GOLDEN / "qwen3", **options):
    """Flags as keywords. --threads 1 unless given: on matrices this small a second thread only waits. On the CPU, also where a GPU is."""
    options = {"model": model, "threads": 1, "device": "cpu", **options}
    words = [str(PROGRAM), task, *flags]
    for name, value in options.items():
        words += [] if value is None else [f"--{name}", str(value)]
    return words


def call(words, **more):
    """Its output as text; generated text need not be UTF-8."""
    return subprocess.run(words, capture_output=True, text=True, errors="replace", env=ENVIRONMENT, timeout=120, **more)


def train(output, *flags, task="sft", **options):
    options = {"max_len": 64, "train_batch_size": 4, "learning_rate": 1e-3, "output_dir": output, **options}
    if options["train_batch_size"] is None:
        del options["train_batch_size"]
    result = call(command(task, *flags, **options))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    return result.stdout


def refused(words, *parts, **more):
    """One message, with a cause and a fix, and exit code 1."""
    result = call(words, **more)
    assert result.returncode == 1, (result.returncode, result.stdout, result.stderr)
    assert result.stderr.count("train_llama: ") == 1 and result.stderr.startswith("train_llama: "), result.stderr
    assert result.stderr.count("fix: ") == 1, result.stderr
    for part in parts:
        assert part in result.stderr, (part, result.stderr)
    return result


def refused_training(data, output, *parts, words=(), **options):
    return refused(command("sft", *words, **{"data": data, "output_dir": output, "max_len": 64, **options}), *parts)


def weights(directory):
    return (directory / "model.safetensors").read_bytes()


def log_lines(output):
    """Without the last, the summary."""
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if "summary" not in line]


def summary(output):
    return json.loads((output / "log.jsonl").read_text().splitlines()[-1])["summary"]


def stable(lines):
    return [{key: value for key, value in line.items() if key not in VARYING} for line in lines if "step" in line]


def first_step(output):
    return log_lines(output)[1]


def checkpoints(output):
    return sorted(int(path.name[5:]) for path in output.glob("step_*"))


def read_tensors(path):
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + length])
    header.pop("__metadata__", None)
    dtypes = {"F32": "<f4", "I32": "<i4", "U16": "<u2", "U8": "u1", "I64": "<i8"}
    return {name: np.frombuffer(raw[8 + length:][slice(*info["data_offsets"])], dtypes[info["dtype"]]).reshape(info["shape"]).copy()
            for name, info in header.items()}


def write_tensors(path, tensors):
    header, at = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(v.tobytes() for v in tensors.values()))


def model_with(tmp_path, name, change, model="qwen3"):
    """A copy of a golden model in which change(array) was applied to one tensor."""
    directory = shutil.copytree(GOLDEN / model, tmp_path / "changed")
    tensors = read_tensors(directory / "model.safetensors")
    change(tensors[name])
    write_tensors(directory / "model.safetensors", tensors)
    return directory


# ---- resuming ---------------------------------------------------------------------------------------------------------------------

RESUMED = {  # 23 samples: 6 steps of 4 make an epoch, the checkpoint of step 4 is in the first one and the end in the second
    "f32": {},
    "bf16": {"dtype": "bf16"},
    "moments": {"dtype": "bf16", "moments": "bf16"},
    "8bit": {"moments": "8bit"},
    "muon": {"dtype": "bf16", "optimizer": "muon", "moments": "bf16", "weight_decay": 0.1},
    "grad_dtype": {"dtype": "bf16", "grad_dtype": "bf16", "moments": "bf16", "row_tokens": 64},
    "eval_fraction": {"eval_fraction": 0.2, "eval_steps": 2},
    "train_batch_tokens": {"train_batch_size": None, "train_batch_tokens": 150},
    "file_order": {"shuffle": "false", "weight_decay": 0.1},
}


@pytest.mark.parametrize("name", RESUMED)
def test_resuming_gives_the_same_bits(name, data, tmp_path):
    options = {"data": data, "max_steps": 9, **RESUMED[name]}
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    train(straight, **options)
    train(stopped, save_steps=4, max_num=9, **options)
    assert checkpoints(stopped) == [4, 8]
    assert weights(stopped) == weights(straight)
    assert stable(log_lines(stopped)) == stable(log_lines(straight))
    assert any(line.get("epoch", 0) > 1 for line in log_lines(straight))

    said = train(stopped, save_steps=4, resume=stopped / "step_4", **options)  # an epoch's border lies ahead
    assert "at step 4" in said
    assert weights(stopped) == weights(straight)
    assert stable(log_lines(stopped)) == stable(log_lines(straight))
    said = train(stopped, save_steps=4, resume="auto", **options)
    assert "at step 8" in said
    assert weights(stopped) == weights(straight)
    assert stable(log_lines(stopped)) == stable(log_lines(straight))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_stages_2_and_3_give_the_same_bits_and_resume_each_other(optimizer, data, tmp_path):
    options = {"data": data, "max_steps": 4, "save_steps": 2, "ranks": 3, "row_tokens": 64, "recompute": "layer", "optimizer": optimizer}
    for stage in (2, 3):
        train(tmp_path / str(stage), "--debug", zero_stage=stage, **options)
    want = weights(tmp_path / "2")
    assert weights(tmp_path / "3") == want
    for stage in (2, 3):
        run = tmp_path / str(stage)
        assert "at step 2" in train(run, zero_stage=5 - stage, resume=run / "step_2", **options)
        assert weights(run) == want
    losses = [line["loss"] for line in log_lines(tmp_path / "3") if "loss" in line]
    train(tmp_path / "3", zero_stage=3, resume=tmp_path / "3" / "step_2", **{**options, "ranks": 2})
    again = [line["loss"] for line in log_lines(tmp_path / "3") if "loss" in line]
    assert len(again) == 4 and all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(again, losses))


def test_resuming_drops_the_future(data, tmp_path):
    run = tmp_path / "a"
    options = {"data": data, "max_steps": 6, "save_steps": 1, "max_num": 9}
    train(run, **options)
    whole = log_lines(run)
    with open(run / "log.jsonl", "a") as file:
        file.write('{"step": 7, "lo')  # as a crash leaves it
    train(run, resume=run / "step_2", **{**options, "save_steps": 3, "max_num": 1})
    assert stable(log_lines(run)) == stable(whole)
    assert "task" in log_lines(run)[0] and sum("task" in line for line in log_lines(run)) == 1
    assert checkpoints(run) == [6] and (run / "latest").read_text() == "step_6\n"


def test_resuming_into_another_directory(data, tmp_path):
    options = {"data": data, "max_steps": 4}
    train(tmp_path / "a", save_steps=2, **options)
    train(tmp_path / "b", resume=tmp_path / "a" / "step_2", **options)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    assert [line.get("step") for line in log_lines(tmp_path / "b")][:3] == [None, 3, 4]  # its log also begins with the description
    refused_training(data, tmp_path / "b", "already holds a run", resume=tmp_path / "a" / "step_2", train_batch_size=4)


REFUSED = [("seed", {"seed": 7}), ("train_batch_size", {"train_batch_size": 5}), ("dtype", {"dtype": "bf16"}),
           ("optimizer", {"optimizer": "muon"}), ("shuffle", {"shuffle": "false"}), ("eval_fraction", {"eval_fraction": 0.3}), ("max_samples", {"max_samples": 9}),
           ("train_batch_size", {"train_batch_size": None, "train_batch_tokens": 100})]


def test_a_changed_run_is_not_resumed(data, tmp_path):
    run = tmp_path / "a"
    options = {"data": data, "max_steps": 2, "train_batch_size": 4}
    train(run, save_steps=2, **options)
    before = weights(run)
    for name, change in REFUSED:
        changed = {**options, **change}
        refused_training(changed.pop("data"), run, f"was made with --{name} ", resume="auto", **changed)
    other = write_data(tmp_path / "other.safetensors", random_documents(23, seed=1))
    refused_training(other, run, "was made with data", resume="auto", max_steps=2, train_batch_size=4)
    refused(command("pretrain", data=data, output_dir=run, max_len=64, max_steps=2, train_batch_size=4, resume="auto"), "was made with task sft")
    assert weights(run) == before

    moved = shutil.copy(data, tmp_path / "moved.safetensors")
    said = train(run, resume="auto", **{**options, "data": moved, "max_steps": 3, "learning_rate": 2e-3, "recompute": "layer"})
    for name in ("data", "max_steps", "learning_rate", "recompute"):
        assert f"note: --{name} was " in said
    assert "note: --train_batch_size" not in said
    assert log_lines(run)[-1]["step"] == 3


@pytest.mark.parametrize("damage, parts", [
    (lambda c: (c / "trainer_state.json").unlink(), ["step_2: has no trainer_state.json, so it is no whole checkpoint", "fix: --overwrite"]),
    (lambda c: (c / "trainer_state.json").write_text("{"), ["trainer_state.json"]),
    (lambda c: (c / "trainer_state.json").write_text('{"step": 2}'), ["trainer_state.json", "is damaged"]),
    (lambda c: (c / OPTIMIZER).write_bytes((c / OPTIMIZER).read_bytes()[:-1]), [OPTIMIZER, "bytes, but"]),
    (lambda c: (c / OPTIMIZER).write_bytes((c / OPTIMIZER).read_bytes()[:-1] + b"?"), [OPTIMIZER, 'tensor "v" is damaged']),
    (lambda c: (c / OPTIMIZER).unlink(), [OPTIMIZER, "No such file"]),
    (lambda c: (c / "optimizer.json").write_text("{"), ["optimizer.json"]),
])
def test_a_damaged_checkpoint_is_refused(damage, parts, data, tmp_path):
    run = tmp_path / "a"
    train(run, data=data, max_steps=2, save_steps=2)
    damage(run / "step_2")
    result = call(command("sft", data=data, output_dir=run, max_len=64, max_steps=2, train_batch_size=4, resume="auto"))
    assert result.returncode == 1 and result.stderr.startswith("train_llama: ")
    for part in parts:
        assert part in result.stderr


# ---- stopping ------------------------------------------------------------------------------------------------------------------

def test_signals_end_a_run_in_good_order(data, tmp_path):
    """SIGINT, SIGTERM, SIGUSR1 and SIGHUP, one after the other, in one resumed run."""
    steps = 400
    straight, run = tmp_path / "straight", tmp_path / "run"
    options = {"data": data, "max_steps": steps, "max_len": 64, "train_batch_size": 8, "learning_rate": 1e-3}
    train(straight, **options)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        done = len(log_lines(run)) if run.exists() else 0
        words = command("sft", output_dir=run, resume="auto", **options)
        # The pipe holds about 50 lines of steps, so that a run cannot end before it has got its signal.
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pipesize=4096)
        log = run / "log.jsonl"
        while process.poll() is None and (not log.exists() or log.read_bytes().count(b"\n") < done + 3):
            time.sleep(0.001)
        process.send_signal(number)
        said, error = process.communicate(timeout=60)
        assert error == ""
        assert process.returncode == 128 + number, said
        last = log_lines(run)[-1]["step"]
        assert last < steps
        assert "stopped by signal" in said and f"after step {last}" in said and "--resume auto" in said
        assert (run / "latest").read_text() == f"step_{last}\n"
    train(run, resume="auto", **options)
    assert weights(run) == weights(straight)
    assert stable(log_lines(run)) == stable(log_lines(straight))


def test_leftovers_of_a_crash_go_and_nothing_else(data, tmp_path):
    run = tmp_path / "a"
    train(run, data=data, max_steps=2, save_steps=1)
    for name in ("step_2.tmp", "step_by_step", "step_5_notes", "step_7.tmp"):
        (run / name).mkdir()
        (run / name / "config.json").write_text("x")
    (run / "step_2.tmp" / "notes.txt").write_text("mine")
    train(run, data=data, max_steps=3, save_steps=1, resume="auto")
    assert sorted(p.name for p in run.iterdir() if p.is_dir()) == ["step_1", "step_2", "step_3", "step_5_notes", "step_7.tmp", "step_by_step"]
    assert (run / "step_2" / "notes.txt").read_text() == "mine" and (run / "step_2" / "trainer_state.json").exists()


def test_overwrite_removes_what_runs_wrote_and_nothing_else(data, tmp_path):
    run = tmp_path / "a"
    train(run, data=data, max_steps=3, save_steps=1)
    written = {p for p in run.rglob("*") if p.is_file()}
    mine = {run / name: os.urandom(8) for name in ("notes.txt", "model-00001-of-00002.safetensors", "step_2/plot.png", "step_2/old/config.json", "step_9/config.json")}
    for path, content in mine.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    train(run, "--overwrite", data=data, max_steps=1)
    kept = {run / name for name in ("config.json", "generation_config.json", "model.safetensors", "log.jsonl", "run_files.json")}
    assert {p for p in run.rglob("*") if p.is_file()} & written == kept
    train(run, "--overwrite", data=data, max_steps=2, save_steps=1)  # next to the leftovers of step_2
    assert {path: path.read_bytes() for path in mine} == mine and (run / "step_2" / "trainer_state.json").exists()
    (run / "tokenizer.json").write_text("mine")
    refused_training(data, run, "step_9", "no run wrote it", "move it away", words=["--overwrite"], max_steps=9)
    assert weights(run) and {path: path.read_bytes() for path in mine} == mine


# ---- the output directory and the log ---------------------------------------------------------------------------------------------

def test_max_num_keeps_the_newest(data, tmp_path):
    train(tmp_path / "a", data=data, max_steps=11, save_steps=1, max_num=2)
    assert checkpoints(tmp_path / "a") == [10, 11]
    assert (tmp_path / "a" / "latest").read_text() == "step_11\n"
    train(tmp_path / "a", data=data, max_steps=11, save_steps=1, max_num=1, resume="auto")  # as after a crash just before it pruned
    assert checkpoints(tmp_path / "a") == [11]


def test_a_directory_in_use_is_refused(data, tmp_path):
    run = tmp_path / "a"
    train(run, data=data, max_steps=2, save_steps=1)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    refused_training(data, run, "already holds a run", "--resume auto", "--overwrite")
    refused_training(tmp_path / "absent.safetensors", run, "absent.safetensors", words=["--overwrite"])  # a mistake costs nothing
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    model = shutil.copytree(GOLDEN / "qwen3", tmp_path / "model")
    refused_training(data, model, "is not empty", model=model)

    other_run = os.open(run, os.O_RDONLY)
    fcntl.flock(other_run, fcntl.LOCK_EX)
    for flag in ("--overwrite", "--resume=auto"):
        refused_training(data, run, str(run), "another run is writing there", words=[flag])
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    words = command("sft", "--overwrite", output_dir=run, data=data, max_steps=1, seed=7)
    patient = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    time.sleep(1)
    assert patient.poll() is None  # the other one may have been killed, and not have ended yet
    os.close(other_run)
    assert patient.communicate(timeout=60)[1] == "" and patient.returncode == 0
    assert checkpoints(run) == [] and not (run / "latest").exists()
    assert [line.get("step") for line in log_lines(run)][:2] == [None, 1]


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "step_7.tmp/notes.txt", "notes.txt"])
def test_a_directory_of_the_user_s_is_left_alone(name, data, tmp_path):
    (tmp_path / "a" / name).parent.mkdir(parents=True)
    (tmp_path / "a" / name).write_text("mine")
    for words in ([], ["--overwrite"], ["--resume=auto"]):
        refused_training(data, tmp_path / "a", "is not empty", f"it holds {name.split('/')[0]}", words=words)
    assert (tmp_path / "a" / name).read_text() == "mine"


def test_the_log(data, tmp_path):
    train(tmp_path / "a", data=data, max_epochs=2, eval_data=data)
    first, *lines = log_lines(tmp_path / "a")
    assert first["task"] == "sft" and first["options"]["learning_rate"] == 1e-3 and first["device"] == "cpu" and first["world"] == 1
    assert first["model"]["family"] == "qwen3" and first["model"]["parameters"] == 27872
    assert first["plan_bytes"] > 0 and first["steps"] == 12
    steps, evals = [l for l in lines if "loss" in l], [l for l in lines if "eval_loss" in l]
    wanted = "step epoch loss grad_norm lr samples tokens target_tokens tok_s step_s mfu peak_mem entropy mean_token_accuracy"
    for line in steps:
        assert set(wanted.split()) <= set(line), line
        assert line["loss"] > 0 and line["grad_norm"] > 0 and line["mfu"] is None and line["peak_mem"] > 0
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert [line["step"] for line in evals] == [6, 12]
    assert steps[5]["epoch"] == 1 and steps[11]["epoch"] == 2
    documents = random_documents(23)
    assert steps[-1]["samples"] == 46
    assert steps[-1]["tokens"] == 2 * sum(len(ids) for ids, _ in documents)
    assert steps[-1]["target_tokens"] == 2 * sum(int(mask.sum()) for _, mask in documents) == 2 * evals[0]["eval_target_tokens"]
    assert evals[1]["eval_loss"] < evals[0]["eval_loss"] < steps[0]["loss"]
    assert math.isclose(evals[0]["eval_perplexity"], math.exp(evals[0]["eval_loss"]), rel_tol=1e-12)
    last = summary(tmp_path / "a")
    assert {name: last[name] for name in ("steps", "samples", "tokens", "target_tokens", "skipped", "loss_spikes", "restarts")} == {
        "steps": 12, **{name: steps[-1][name] for name in ("samples", "tokens", "target_tokens")}, "skipped": 0, "loss_spikes": 0, "restarts": 0}
    assert last["best_step"] == 12 and last["best_eval_loss"] == evals[1]["eval_loss"] and last["peak_mem"] >= steps[-1]["peak_mem"]
    assert math.isclose(last["tok_s"], last["tokens"] / sum(line["step_s"] for line in steps), rel_tol=1e-9)
    assert last["hours"] * 3600 > sum(line["step_s"] for line in steps)


def test_the_best_model_is_kept(data, tmp_path):
    """A rate that becomes far too large: the best evaluation is not the last. Resumed after it, at it and before it, it is the same."""
    options = {"data": data, "eval_data": data, "eval_steps": 2, "learning_rate": 1, "max_steps": 10, "lr_scheduler": "linear",
               "lr_warmup_ratio": 0.9, "save_steps": 2, "max_num": 9}
    train(tmp_path / "a", **options)
    evals = {line["step"]: line["eval_loss"] for line in log_lines(tmp_path / "a") if "eval_loss" in line}
    step = min(evals, key=evals.get)
    assert step == 4
    evaluation = json.loads((tmp_path / "a" / "best" / "evaluation.json").read_text())
    assert evaluation["step"] == step and evaluation["eval_loss"] == evals[step]
    assert summary(tmp_path / "a")["best_step"] == step
    assert evaluate(tmp_path / "a" / "best", data, tmp_path, max_len=64)["eval_loss"] == evals[step]
    best = weights(tmp_path / "a" / "best")
    for again in (8, 4, 2):
        train(tmp_path / "a", resume=tmp_path / "a" / f"step_{again}", **options)
        assert weights(tmp_path / "a" / "best") == best and summary(tmp_path / "a")["best_step"] == step
        assert sum("summary" in line for line in (tmp_path / "a" / "log.jsonl").read_text().splitlines()) == 1
    assert summary(tmp_path / "a")["restarts"] == 1  # each time from a checkpoint of the first run
    del options["eval_data"]
    train(tmp_path / "a", "--overwrite", **options)
    assert not (tmp_path / "a" / "best").exists() and "best_step" not in summary(tmp_path / "a")


def test_a_run_ends_where_its_evaluations_become_no_better(data, tmp_path):
    """The rate grows until it is far too large. Resumed after the best evaluation, the run ends at the same step."""
    options = {"data": data, "eval_data": data, "eval_steps": 2, "learning_rate": 1, "max_steps": 40, "lr_scheduler": "linear",
               "lr_warmup_ratio": 0.9, "save_steps": 2, "max_num": 99, "early_stopping_patience": 3}
    said = train(tmp_path / "a", **options)
    steps = [line["step"] for line in log_lines(tmp_path / "a") if "eval_loss" in line]
    best = summary(tmp_path / "a")["best_step"]
    assert steps[-1] == best + 6 < 40 and summary(tmp_path / "a")["steps"] == best + 6
    assert f"stopped after step {best + 6}: 3 evaluations in a row were no better than that of step {best}" in said
    end = weights(tmp_path / "a")
    train(tmp_path / "a", resume=tmp_path / "a" / f"step_{best + 2}", **options)
    assert weights(tmp_path / "a") == end
    del options["eval_data"]
    refused(command("sft", **options, output_dir=tmp_path / "b"), "--early_stopping_patience", "--eval_data")


def test_logging_steps_and_another_log_file(data, tmp_path):
    log = tmp_path / "b.jsonl"
    train(tmp_path / "a", data=data, max_steps=5, logging_steps=2, log=log)
    assert not (tmp_path / "a" / "log.jsonl").exists()
    assert [json.loads(line).get("step") for line in log.read_text().splitlines()] == [None, 2, 4, 5, None]


def test_steps_as_a_share_of_a_run_of_unknown_length(data, tmp_path):
    """A share of all steps is rounded up, as in transformers, and is the number of steps that it stands for."""
    options = {"data": data, "eval_data": data, "max_epochs": 3, "train_batch_size": 4, "max_num": 99}
    train(tmp_path / "shares", save_steps=0.3, eval_steps=0.4, logging_steps=0.15, lr_warmup_steps=0.25, **options)
    steps = summary(tmp_path / "shares")["steps"]
    counts = {name: math.ceil(share * steps) for name, share in
              {"save_steps": 0.3, "eval_steps": 0.4, "logging_steps": 0.15, "lr_warmup_steps": 0.25}.items()}
    assert len(set(counts.values())) > 2, steps
    train(tmp_path / "numbers", **counts, **options)
    seen = [[{key: line[key] for key in ("step", "lr", "loss", "eval_loss") if key in line} for line in log_lines(tmp_path / name)]
            for name in ("shares", "numbers")]
    assert seen[0] == seen[1]
    assert sorted(path.name for path in (tmp_path / "shares").glob("step_*")) == sorted(path.name for path in (tmp_path / "numbers").glob("step_*"))
    assert (tmp_path / "shares" / f"step_{counts['save_steps']}").exists()


# ---- what must not change a result ------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("many") / "data.safetensors", random_documents(90, seed=2))


@pytest.mark.parametrize("name, change", [
    ("rows of 512", {"row_tokens": 512}), ("rows of 64", {"row_tokens": 64}), ("file order", {"shuffle": "false"}),
    ("2 threads", {"threads": 2}),
])
def test_how_a_step_is_executed_does_not_matter(name, change, many, tmp_path):
    options = {"data": many, "max_steps": 1, "train_batch_size": 90, "row_tokens": 2048}
    train(tmp_path / "a", **options)
    train(tmp_path / "b", **{**options, **change})
    a, b = first_step(tmp_path / "a"), first_step(tmp_path / "b")
    for key in ("loss", "grad_norm", "entropy"):
        print(f"\n  {name:12} {key:10} {abs(a[key] / b[key] - 1):.1e} of 1e-6 allowed", end="")
        assert math.isclose(a[key], b[key], rel_tol=1e-6), key
    assert a["tokens"] == b["tokens"] and a["target_tokens"] == b["target_tokens"]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_recompute_guards_and_poison_give_the_same_bits(dtype, data, tmp_path):
    options = {"data": data, "max_steps": 3, "dtype": dtype}
    train(tmp_path / "none", recompute="none", **options)
    for level, *flags in [("cheap",), ("layer",), ("none", "--debug"), ("layer", "--debug")]:
        train(tmp_path / "other", "--overwrite", *flags, recompute=level, **options)
        assert weights(tmp_path / "other") == weights(tmp_path / "none"), (level, flags)


# ---- models in and out ------------------------------------------------------------------------------------------------------------

def evaluate(model, data, tmp_path, **options):
    log = tmp_path / "eval.jsonl"
    result = call(command("eval", model=model, data=data, log=log, **{"max_len": 128, **options}))
    assert result.returncode == 0, result.stderr
    return json.loads(log.read_text().splitlines()[-1])


@pytest.mark.parametrize("name", ["llama3", "qwen2", "smollm2"])
def test_the_saved_model_reads_back(name, data, tmp_path):
    train(tmp_path / "a", data=data, model=GOLDEN / name, max_epochs=1, eval_data=data)
    last = log_lines(tmp_path / "a")[-1]
    assert evaluate(tmp_path / "a", data, tmp_path, max_len=64)["eval_loss"] == last["eval_loss"]


def expect_as_transformers(name, line):
    """The evaluation of a golden model on its documents."""
    golden = json.loads((GOLDEN / name / "golden.json").read_text())
    assert abs(line["eval_loss"] - golden["loss"]) < 1e-5
    assert abs(line["eval_entropy"] - golden["entropy"]) < 1e-5
    assert line["eval_target_tokens"] == golden["targets"]


@pytest.mark.parametrize("name", ["granite", "ministral", "phi4", "seed_oss", "smollm3"])
def test_ten_steps_equal_transformers(name, tmp_path):
    """Of the families whose gradients test_llama does not compare: golden.json has the losses of ten steps of AdamW."""
    train(tmp_path / "a", model=GOLDEN / name, data=GOLDEN / name / "golden.safetensors", max_len=128, max_steps=11, max_epochs=11, train_batch_size=6,
          lr_scheduler="constant", weight_decay=0.1)
    losses = [line["loss"] for line in log_lines(tmp_path / "a") if "step" in line]
    assert np.abs(np.array(losses) - json.loads((GOLDEN / name / "golden.json").read_text())["losses"]).max() < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_eval_equals_transformers(name, tmp_path):
    expect_as_transformers(name, evaluate(GOLDEN / name, GOLDEN / name / "golden.safetensors", tmp_path))


def test_random_weights_depend_on_the_seed_alone(data, tmp_path):
    blank = tmp_path / "blank"
    blank.mkdir()
    shutil.copy(GOLDEN / "qwen3" / "config.json", blank)
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        train(tmp_path / name, data=data, model=blank, max_steps=1, seed=seed, lr_warmup_ratio=1)  # the first rate is 0
    assert weights(tmp_path / "a") == weights(tmp_path / "b") != weights(tmp_path / "c")


def test_raw_data_needs_the_tree(tmp_path):
    program, questions = shutil.copy(PROGRAM, tmp_path / "train_llama"), tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "1 + 1 =", "completion": " 2"}\n')
    refused([program, *command("sft", data=questions, model=ROOT / "data/demo/model", output_dir=tmp_path / "out")[1:]], "questions.jsonl is raw data",
            f"{tmp_path}/data/prepare.py, which prepares it, does not exist")


def prepare_works():
    python = ROOT / ".venv" / "bin" / "python3"
    probe = [str(python) if python.exists() else "python3", "-c", "import transformers, datasets"]
    return subprocess.run(probe, env=ENVIRONMENT, capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def python_for_data():
    if not prepare_works():
        pytest.skip("raw data needs transformers and datasets in .venv or in python3's path: make deps")


def test_train_the_demo_and_generate(python_for_data, tmp_path):
    cache = {**ENVIRONMENT, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    train(tmp_path / "a", task="sft", data=ROOT / "data" / "demo" / "train.safetensors", model=DEMO, max_steps=2, max_len=2048)
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (DEMO / "tokenizer.json").read_bytes()
    words = command("generate", model=tmp_path / "a", prompt="sort: 3 1 2", max_new_tokens=5)
    outputs = []
    for _ in range(2):
        result = subprocess.run(words, capture_output=True, text=True, env=cache, timeout=120)
        assert result.returncode == 0, result.stderr
        outputs.append(result.stdout)
    assert outputs[0] == outputs[1] != ""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two and three"}\n')
    result = subprocess.run(command("generate", model=tmp_path / "a", prompts=prompts, max_new_tokens=5, temperature=1),
                            capture_output=True, text=True, env=cache, timeout=120)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 2 and all(line["tokens"] <= 5 for line in lines)

    def answers(**options):
        words = command("generate", model=tmp_path / "a", prompts=prompts, max_new_tokens=5, temperature=1, n=3, **options)
        result = subprocess.run(words, capture_output=True, text=True, env=cache, timeout=120)
        assert result.returncode == 0, result.stderr
        return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]

    three = answers()
    assert [line["sample"] for line in three] == [0, 1, 2] * 2 and len({line["completion"] for line in three}) > 2
    assert all(line["finish_reason"] == "length" and line["tokens"] == 5 or line["finish_reason"] == "stop" for line in three)
    assert answers(max_sequences=1) == answers(ranks=2) == three
    refused(command("generate", model=tmp_path / "a", prompts=prompts, n=0), "--n is 0", "at least 1")
    refused(command("generate", model=tmp_path / "a", prompts=prompts, max_sequences=0), "--max_sequences is 0")
    refused(command("sft", model=DEMO, data=prompts, output_dir=tmp_path / "b", n=2), "--n belongs to grpo, ppo, generate")


def test_a_broken_line_of_raw_data_is_named(python_for_data, tmp_path):
    good = '{"prompt": "a", "completion": "b"}\n'
    (tmp_path / "x.jsonl").write_text(2 * good + '{"prompt": "a", \n')
    words = command("sft", model=DEMO, data=tmp_path / "x.jsonl", output_dir=tmp_path / "a")
    result = subprocess.run(words, capture_output=True, text=True, env={**ENVIRONMENT, "XDG_CACHE_HOME": str(tmp_path)}, timeout=120)
    assert result.returncode == 1
    assert result.stderr.startswith("train_llama: record 3 (line 3) of ") and "x.jsonl" in result.stderr
    assert len(result.stderr.splitlines()) == 2 and result.stderr.count("fix: ") == 1
    assert not (tmp_path / "a" / "log.jsonl").exists()


# ---- wrong input ------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_a_mixture_of_experts(model_type, data, tmp_path):
    model = shutil.copytree(GOLDEN / "qwen3", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config.update(model_type=model_type, num_local_experts=8)
    (model / "config.json").write_text(json.dumps(config))
    refused_training(data, tmp_path / "a", "config.json", "model_type", model_type, model=model)


def test_a_truncated_shard(data, tmp_path):
    model = shutil.copytree(GOLDEN / "llama3", tmp_path / "model")
    shard = model / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    refused_training(data, tmp_path / "a", "model-00002-of-00002.safetensors", model=model)


def test_data_of_another_vocabulary(tmp_path):
    mask = np.array([0, 1, 1])
    data = write_data(tmp_path / "data.safetensors", [(np.array([5, 6, 7]), mask), (np.array([5, 96, 7]), mask)], vocab=200)
    refused_training(data, tmp_path / "a", "document 1", "token id 96 at position 1", "vocabulary of 96")


def test_a_sample_longer_than_a_row(tmp_path):
    documents = random_documents(4)
    documents[2] = (np.full(65, 5), np.arange(65) > 0)
    data = write_data(tmp_path / "data.safetensors", documents)
    refused_training(data, tmp_path / "a", "document 2", "65 tokens", "64")
    refused(command("eval", data=data, max_len=64), "document 2", "65 tokens")


def test_no_target_in_the_whole_file(tmp_path):
    documents = [(ids, mask * 0) for ids, mask in random_documents(4)]
    refused_training(write_data(tmp_path / "data.safetensors", documents), tmp_path / "a", "none of its", "is a target")
    prompts = write_data(tmp_path / "prompts.safetensors", documents, kind="prompts")
    refused_training(prompts, tmp_path / "a", "holds prompts")
    refused(command("eval", data=prompts), "holds prompts")


def test_a_misspelled_flag(data, tmp_path):
    refused_training(data, tmp_path / "a", "unknown flag --learning_rat", "did you mean --learning_rate?", words=["--learning_rat", "1"])
    refused_training(data, tmp_path / "a", "--prompts belongs to generate", words=["--prompts", "x"])


def test_an_output_directory_that_is_a_file(data, tmp_path):
    (tmp_path / "a").write_text("x")
    refused_training(data, tmp_path / "a", "is a file")
    refused_training(data, tmp_path / "a" / "b", "cannot create")
    assert (tmp_path / "a").read_text() == "x"
    (tmp_path / "link").symlink_to("nowhere")
    refused_training(data, tmp_path / "link", "is a link to nowhere, where nothing is")


def test_nan_in_the_weights(data, tmp_path):
    def change(w):
        w[3, 5] = np.nan
    name = "model.layers.1.mlp.up_proj.weight"
    model = model_with(tmp_path, name, change)
    refused_training(data, tmp_path / "a", name, "NaN", model=model)
    refused(command("eval", data=data, model=model), name, "NaN")


def test_gradients_that_overflow(data, tmp_path):
    def change(w):
        w *= np.float32(3e38) / np.abs(w).max()
    model = model_with(tmp_path, "model.layers.1.mlp.down_proj.weight", change)
    result = refused_training(data, tmp_path / "a", "5 steps in a row", "first in ", model=model, train_batch_size=4, max_steps=9)
    assert result.stdout.count("skipped: its loss or gradient is not finite") == 5
    lines = log_lines(tmp_path / "a")[1:]
    assert [line["skipped"] for line in lines] == [1, 2, 3, 4]


@pytest.mark.parametrize("tensor, first", [
    ("layers.1.mlp.down_proj", r"forward, layer 1, down: element \d+ of act\.2\.x\n"),
    ("layers.0.self_attn.v_proj", r"forward, layer 0, qkv: element \d+ of act\.0\.qkv\n"),
    ("layers.1.self_attn.o_proj", r"forward, layer 1, proj: element \d+ of act\.1\.ln2\n"),
])
@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}, {"recompute": "layer"}, {"ranks": 2, "ring_attn_size": 2}, {"ranks": 2, "zero_stage": 2},
                                     {"ranks": 2, "zero_stage": 3}],
                         ids=lambda options: " ".join(map(str, options.values())))
def test_debug_names_the_first_op(tensor, first, options, data, tmp_path):
    def change(w):
        w *= np.float32(3e38) / np.abs(w).max()
    changed = model_with(tmp_path, f"model.{tensor}.weight", change)
    result = refused_training(data, tmp_path / "a", "step 1 has a value that is not finite", model=changed, max_steps=9, debug="true", **options)
    assert re.search(first, result.stderr), result.stderr


def test_a_step_without_targets_is_skipped(tmp_path):
    documents = [(ids, mask) for ids, mask in random_documents(4, longest=20)]
    documents[1] = (documents[1][0], documents[1][1] * 0)
    data = write_data(tmp_path / "with.safetensors", documents)  # document 3 has one token, which nothing predicts, either
    options = {"train_batch_size": 1, "shuffle": "false", "lr_scheduler": "constant"}
    said = train(tmp_path / "a", data=data, eval_data=data, **options)
    assert "step 2 skipped: no token" in said and "step 4 skipped: no token" in said and "2 steps skipped" in said
    lines = [line for line in log_lines(tmp_path / "a") if "loss" in line]
    assert [line["skipped"] for line in lines] == [0, 1, 1, 2]
    assert [line["loss"] is None for line in lines] == [False, True, False, True]
    # The other steps, AdamW's step count included, are the same as without it.
    train(tmp_path / "b", data=write_data(tmp_path / "without.safetensors", [documents[0], documents[2]]), **options)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


def test_nothing_to_evaluate_is_said(tmp_path):
    documents = random_documents(8, longest=20)
    documents = [(ids, mask * (i == 0)) for i, (ids, mask) in enumerate(documents)]  # only document 0 has targets
    data = write_data(tmp_path / "data.safetensors", documents)
    said = {}
    for seed in range(8):  # which documents are held out depends on it
        output = tmp_path / str(seed)
        said[seed] = "nothing to evaluate" in train(output, data=data, eval_fraction=0.5, seed=seed)
        assert said[seed] != any("eval_loss" in line for line in log_lines(output))
    assert set(said.values()) == {True, False}


def limit_file_size(size):
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_full_disk_is_noticed_before_the_first_step(data, tmp_path):
    run = tmp_path / "a"
    words = command("sft", data=data, output_dir=run, max_len=64, save_steps=1)
    refused(words, "cannot write: File too large", preexec_fn=limit_file_size(65536))
    assert list(run.iterdir()) == []
    assert call(words).returncode == 0  # with room it runs, and nothing is in its way


def test_a_log_that_cannot_be_written(data, tmp_path):
    refused_training(data, tmp_path / "a", "cannot write the log", "/dev/full", log="/dev/full")
    refused_training(data, tmp_path / "b", "cannot write the log", log=tmp_path / "absent" / "log.jsonl")


@pytest.mark.parametrize("words", [[], ["sft"]])
def test_help(words):
    result = call([str(PROGRAM), *words, "--help"])
    assert result.returncode == 0 and result.stderr == "" and "usage: ./train_llama" in result.stdout
