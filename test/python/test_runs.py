"""Whole runs of train_llama on the tiny models of test/golden: resuming, stopping, the log, evaluations, and steps that are skipped or refused."""

import fcntl
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
import time

import pytest
from runs import (
    DEMO, GOLDEN, PROGRAM, ROOT, SMALL, call, checkpoints, command, descendants, evaluate, expect_end_of, log_lines, model_with, near, overflowing,
    random_documents, read_lines, refused, refused_training, same_run, start, steps_logged, succeeds, summary, train, wait_for, weights, write_data,
    write_lines)
from test_sampling import with_tokenizer


def files_below(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# ---- resuming ---------------------------------------------------------------------------------------------------------------------

def test_a_changed_run_is_not_resumed(data, tmp_path):
    run, options = tmp_path / "a", {"max_steps": 2, "train_batch_size": 4, "resume": "auto"}
    train(run, data=data, save_steps=2, **options | {"resume": None})
    before = weights(run)
    for change in ({"seed": 7}, {"train_batch_size": 5}, {"dtype": "bf16"}, {"optimizer": "muon"}, {"shuffle": "false"}, {"eval_fraction": 0.3},
                   {"max_samples": 9}, {"lora_rank": 4}, {"neftune_noise_alpha": 6}, {"train_batch_size": None, "train_batch_tokens": 100}):
        refused_training(data, run, f"was made with --{next(iter(change))} ", **options | change)
    other = write_data(tmp_path / "other.safetensors", random_documents(23, seed=1))
    refused_training(other, run, "was made with data", **options)
    refused(command("pretrain", data=data, output_dir=run, max_len=64, **options), "was made with task sft")
    assert weights(run) == before

    moved = shutil.copy(data, tmp_path / "moved.safetensors")
    said = train(run, **options | {"data": moved, "max_steps": 3, "learning_rate": 2e-3, "recompute": "layer"})
    for name in ("data", "max_steps", "learning_rate", "recompute"):
        assert f"note: --{name} was " in said
    assert "note: --train_batch_size" not in said
    assert log_lines(run)[-1]["step"] == 3


def test_a_note_on_a_run_of_warm_up_alone(data, tmp_path):
    assert "has the rate 0 and changes no weight: --lr_warmup 0" in train(tmp_path / "one", data=data, max_steps=1)
    assert "warm-up" not in train(tmp_path / "two", data=data, max_steps=2)


# ---- stopping ---------------------------------------------------------------------------------------------------------------------

def test_a_signal_lets_a_run_save_and_end(data, tmp_path):
    """SIGINT, SIGTERM, SIGUSR1 and SIGHUP in turn stop a run, which resumes each time."""
    straight, run = tmp_path / "straight", tmp_path / "run"
    options = {**SMALL, "data": data, "max_steps": 400, "train_batch_size": 8}
    train(straight, **options)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        done = len(log_lines(run)) if run.exists() else 0
        # The pipe holds about 50 lines of steps, so the run blocks until its signal arrives.
        process = start(command("sft", output_dir=run, resume="auto", **options), pipesize=4096)
        wait_for(lambda: steps_logged(run / "log.jsonl") >= done + 2, process)  # noqa: B023
        process.send_signal(number)
        said, error = process.communicate(timeout=60)
        assert error.count("\n") == 1 and error.startswith(f"{number.name}: the run stops ") and process.returncode == 128 + number, said + error
        last = log_lines(run)[-1]["step"]
        assert last < 400
        assert "stopped by signal" in said and f"after step {last}" in said and "--resume auto" in said
        assert (run / "latest").read_text() == f"step_{last}\n"
    train(run, resume="auto", **options)
    same_run(run, straight)


def test_a_signal_stops_sampling(tmp_path):
    """The answers would take minutes. A signal that follows immediately is a repetition of the first."""
    run, options = tmp_path / "run", {"model": DEMO, "data": DEMO.parent / "train.safetensors", "reward": "exact_match", "rollout_batch_size": 2000, "n": 8,
                                      "max_new_tokens": 250}
    process = start(command("grpo", output_dir=run, max_steps=1, **options))
    wait_for((run / "log.jsonl").exists, process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    said, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and re.fullmatch("SIGTERM: the run stops (after this token|within this step); a second signal ends it at once\n", error)
    assert "stopped by signal Terminated after step 0; there is nothing to save\n  to continue: the same command with --resume auto" in said


def test_a_second_signal_ends_a_run_at_once(data, tmp_path):
    run = tmp_path / "run"
    process = start(command("sft", output_dir=run, data=data, **SMALL, max_steps=400), pipesize=4096)  # which blocks the run
    wait_for(lambda: steps_logged(run / "log.jsonl") >= 30, process)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(1.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == -signal.SIGINT and not list(run.glob("step_*"))
    process.communicate()


def test_a_signal_while_workers_are_forked_ends_preparation(tmp_path):
    """Python ignores an exception of a signal's handler that runs in a function around a fork."""
    raw = write_lines(tmp_path / "raw.jsonl", [{"text": f"{i} word word word"} for i in range(20000)])
    words = ["sft", "--tokenizer", with_tokenizer(tmp_path), "--data", raw, "--out", tmp_path / "out.safetensors"]
    program = ("import os, runpy, signal, sys\n"
               "os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
               "sys.argv = sys.argv[1:]\n"
               "sys.path[0] = os.path.dirname(sys.argv[0])\n"
               "runpy.run_path(sys.argv[0], run_name='__main__')")
    result = call([sys.executable, "-c", program, ROOT / "data/prepare.py", *map(str, words)])
    assert result.returncode == 128 + signal.SIGTERM, result.stderr
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("number, alone", [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGKILL, False), (signal.SIGINT, True), (signal.SIGHUP, True)])
def test_a_signal_ends_preparation_with_its_processes(number, alone, own_cache, tmp_path):
    """Also SIGINT if a shell has started the run in the background, where SIGINT is ignored. alone: prepare.py without train_llama."""
    text = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife. " * 20
    raw = write_lines(tmp_path / "raw.jsonl", [{"text": f"{i} {text}"} for i in range(20000)])
    if alone:
        words = [sys.executable, ROOT / "data/prepare.py", "sft", "--tokenizer", with_tokenizer(tmp_path), "--data", raw, "--out", tmp_path / "cache/out.safetensors"]
        (tmp_path / "cache").mkdir(exist_ok=True)
    else:
        words = command("sft", model=with_tokenizer(tmp_path), data=raw, output_dir=tmp_path / "run", max_len=20000)
    process = start(["bash", "-c", 'trap "" INT; exec "$@"', "bash", *words])
    wait_for(lambda: len(descendants(process.pid)) >= (2 if alone else 3), process)  # two workers and, unless alone, prepare.py
    others = descendants(process.pid)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (128 + number if alone else -number)
    expect_end_of(others)
    assert not list((tmp_path / "cache").rglob("*.tmp*"))


# ---- the output directory and the log ---------------------------------------------------------------------------------------------

def test_a_directory_in_use_is_refused(data, tmp_path):
    run = tmp_path / "a"
    train(run, data=data, max_steps=2, save_steps=1)
    before = files_below(run)
    refused_training(data, run, "already holds a run", "--resume auto", "--overwrite")
    refused_training(tmp_path / "absent.safetensors", run, "absent.safetensors", words=["--overwrite"])  # nothing is removed before the error
    finished = tmp_path / "finished"
    train(finished, data=data, max_steps=2, resume="auto")
    refused_training(data, finished, "holds a finished model and no checkpoint", "--overwrite", words=["--resume=auto"])
    model = shutil.copytree(GOLDEN / "qwen3", tmp_path / "model")
    for flag in ("--debug", "--overwrite", "--resume=auto"):
        refused_training(data, model, "holds files that no run wrote: ", model=model, words=[flag])
    assert files_below(model) == {model / path.name: path.read_bytes() for path in (GOLDEN / "qwen3").iterdir()}

    other_run = os.open(run, os.O_RDONLY)
    fcntl.flock(other_run, fcntl.LOCK_EX)
    refused_training(data, run, str(run), "another run is writing there", words=["--resume=auto"])
    assert files_below(run) == before
    hidden = shutil.move(run / "step_2", tmp_path)
    patient = start(command("sft", output_dir=run, data=data, resume="auto", **{**SMALL, "max_steps": 3}))
    time.sleep(0.3)
    assert patient.poll() is None  # the start waits a moment, because the other run may just be saving
    shutil.move(hidden, run / "step_2")
    os.close(other_run)
    said, error = patient.communicate(timeout=60)
    assert patient.returncode == 0 and f"resumed from {run}/step_2 at step 2" in said, said + error
    train(run, "--overwrite", data=data, max_steps=1, seed=7)
    assert checkpoints(run) == [] and not (run / "latest").exists() and log_lines(run)[1]["step"] == 1


@pytest.mark.parametrize("what", ["deleted", "replaced"])
def test_the_log_is_deleted_or_replaced(what, data, tmp_path):
    """A deleted log is written again, with all lines; another file gets the next lines."""
    straight, run = tmp_path / "straight", tmp_path / "run"
    options = {**SMALL, "data": data, "max_steps": 200}
    train(straight, **options)
    process = start(command("sft", output_dir=run, **options), pipesize=4096)
    wait_for(lambda: steps_logged(run / "log.jsonl") >= 3, process)
    if what == "deleted":
        (run / "log.jsonl").unlink()
    else:
        write_lines(tmp_path / "new", []).rename(run / "log.jsonl")
    said, error = process.communicate(timeout=60)
    assert process.returncode == 0 and said.count("note: ") == said.count(f"note: {run}/log.jsonl was {what}: ") == 1, said + error
    if what == "deleted":
        same_run(run, straight)
    else:
        assert 10 < len(log_lines(run)) < len(log_lines(straight)) and summary(run)["steps"] == 200


def test_the_log(data, tmp_path):
    train(tmp_path / "a", data=data, max_epochs=2, eval_data=data)
    first, *lines = log_lines(tmp_path / "a")
    assert first.items() >= {"task": "sft", "device": "cpu", "world": 1, "steps": 12}.items() and first["plan_bytes"] > 0
    assert first["options"]["learning_rate"] == 1e-3 and first["model"]["family"] == "qwen3" and first["model"]["parameters"] == 27872
    steps, evals = [line for line in lines if "loss" in line], [line for line in lines if "eval_loss" in line]
    wanted = "step epoch loss grad_norm lr samples tokens target_tokens tok_s step_s mfu peak_mem entropy mean_token_accuracy"
    for line in steps:
        assert set(wanted.split()) <= set(line), line
        assert line["loss"] > 0 and line["grad_norm"] > 0 and line["mfu"] is None and line["peak_mem"] > 0
    assert [line["step"] for line in steps] == list(range(1, 13)) and [line["step"] for line in evals] == [6, 12]
    assert steps[5]["epoch"] == 1 and steps[11]["epoch"] == 2 and steps[11]["samples"] == 46
    documents = random_documents(23)
    assert steps[-1]["tokens"] == 2 * sum(len(ids) for ids, _ in documents)
    assert steps[-1]["target_tokens"] == 2 * sum(int(mask.sum()) for _, mask in documents) == 2 * evals[0]["eval_target_tokens"]
    assert evals[1]["eval_loss"] < evals[0]["eval_loss"] < steps[0]["loss"]
    near(evals[0]["eval_perplexity"], math.exp(evals[0]["eval_loss"]), 1e-12)
    last, seconds = summary(tmp_path / "a"), sum(line["step_s"] for line in steps)
    assert last.items() >= {"steps": 12, **{name: steps[-1][name] for name in ("samples", "tokens", "target_tokens")}, "skipped": 0, "loss_spikes": 0,
                            "restarts": 0, "best_step": 12, "best_eval_loss": evals[1]["eval_loss"]}.items()
    assert last["peak_mem"] >= steps[-1]["peak_mem"] and last["hours"] * 3600 > seconds
    near(last["tok_s"], last["tokens"] / seconds, 1e-9)


BECOMES_TOO_LARGE = {"eval_steps": 2, "learning_rate": 1, "lr_scheduler": "linear", "lr_warmup": 0.9, "save_steps": 2,
                     "max_num": 99}  # the rate


def test_the_best_model_is_kept(data, tmp_path):
    """The best evaluation is not the last. It remains the best in runs that resume after it, at it and before it."""
    run, options = tmp_path / "a", {**BECOMES_TOO_LARGE, "data": data, "max_steps": 10}
    train(run, eval_data=data, **options)
    evals = {line["step"]: line["eval_loss"] for line in log_lines(run) if "eval_loss" in line}
    step = min(evals, key=evals.get)
    assert step == 4
    evaluation = json.loads((run / "best" / "evaluation.json").read_text())
    assert evaluation["step"] == step and evaluation["eval_loss"] == evals[step]
    assert summary(run)["best_step"] == step
    assert evaluate(run / "best", data, tmp_path, max_len=64)["eval_loss"] == evals[step]
    best = weights(run / "best")
    for again in (8, 4, 2):
        train(run, eval_data=data, resume=run / f"step_{again}", **options)
        assert weights(run / "best") == best and summary(run)["best_step"] == step
        assert sum("summary" in line for line in read_lines(run / "log.jsonl")) == 1
    assert summary(run)["restarts"] == 1  # each resumed from a checkpoint of the first run
    train(run, "--overwrite", **options)
    assert not (run / "best").exists() and "best_step" not in summary(run)


def test_early_stopping(data, tmp_path):
    """A run that resumes after the best evaluation stops at the same step."""
    run, options = tmp_path / "a", {**BECOMES_TOO_LARGE, "data": data, "max_steps": 40, "early_stopping_patience": 3}
    said = train(run, eval_data=data, **options)
    best = summary(run)["best_step"]
    assert [line["step"] for line in log_lines(run) if "eval_loss" in line][-1] == summary(run)["steps"] == best + 6 < 40
    assert f"stopped after step {best + 6}: 3 evaluations in a row were no better than that of step {best}" in said
    end = weights(run)
    train(run, eval_data=data, resume=run / f"step_{best + 2}", **options)
    assert weights(run) == end


def test_logging_steps_and_another_log_file(data, tmp_path):
    log = tmp_path / "b.jsonl"
    train(tmp_path / "a", data=data, max_steps=5, logging_steps=2, log=log)
    assert not (tmp_path / "a" / "log.jsonl").exists()
    assert [line.get("step") for line in read_lines(log)] == [None, 2, 4, 5, None]


def test_steps_as_a_share_of_the_run(data, tmp_path):
    """A share of the steps is rounded up, as in transformers."""
    options, runs = {"data": data, "eval_data": data, "max_epochs": 3, "max_num": 99}, [tmp_path / "shares", tmp_path / "numbers"]
    shares = {"save_steps": 0.3, "eval_steps": 0.4, "logging_steps": 0.15, "lr_warmup": 0.25}
    train(runs[0], **shares, **options)
    counts = {name: math.ceil(share * summary(runs[0])["steps"]) for name, share in shares.items()}
    assert len(set(counts.values())) > 2
    train(runs[1], **counts, **options)
    same_run(*runs)
    assert checkpoints(runs[0]) == checkpoints(runs[1]) and checkpoints(runs[0])[0] == counts["save_steps"]


# ---- models in and out ------------------------------------------------------------------------------------------------------------

def test_random_weights_depend_on_the_seed_alone(data, tmp_path):
    blank = tmp_path / "blank"
    blank.mkdir()
    shutil.copy(GOLDEN / "qwen3" / "config.json", blank)
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        said = train(tmp_path / name, data=data, model=blank, max_steps=1, seed=seed, lr_warmup=1)  # the first learning rate is 0
        assert f"note: {blank} has no weights" in said
    assert weights(tmp_path / "a") == weights(tmp_path / "b") != weights(tmp_path / "c")


def test_raw_data_needs_the_tree(tmp_path):
    program = shutil.copy(PROGRAM, tmp_path / "train_llama")
    questions = write_lines(tmp_path / "questions.jsonl", [{"prompt": "1 + 1 =", "completion": " 2"}])
    refused(command("sft", program=program, data=questions, model=DEMO, output_dir=tmp_path / "out"), "questions.jsonl is raw data",
            f"{tmp_path}/data/prepare.py, which prepares it, does not exist")


def test_train_the_demo_and_generate(own_cache, tmp_path):
    model = tmp_path / "a"
    train(model, data=ROOT / "data" / "demo" / "train.safetensors", model=DEMO, max_steps=2, max_len=2048, max_samples=8)
    assert (model / "tokenizer.json").read_bytes() == (DEMO / "tokenizer.json").read_bytes()
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "one"}, {"prompt": "two and three"}])

    def generated(**options):
        return succeeds(command("generate", model=model, max_new_tokens=5, **options), quiet=False)

    assert generated(prompt="sort: 3 1 2") == generated(prompt="sort: 3 1 2") != ""
    one, two = ([json.loads(line) for line in generated(prompts=prompts, n=3, temperature=1, **options).splitlines() if line.startswith("{")]
                for options in ({}, {"ranks": 2, "max_sequences": 2}))
    assert one == two and [line["sample"] for line in one] == [0, 1, 2] * 2 and len({line["completion"] for line in one}) > 2
    assert all(line["finish_reason"] == "length" and line["tokens"] == 5 or line["finish_reason"] == "stop" for line in one)


# ---- wrong input ------------------------------------------------------------------------------------------------------------------

def test_paths(data, tmp_path):
    (tmp_path / "file").write_text("x")
    refused_training(data, tmp_path / "file", "is a file")
    refused_training(data, tmp_path / "file" / "b", "cannot create")
    assert (tmp_path / "file").read_text() == "x"
    (tmp_path / "link").symlink_to("nowhere")
    refused_training(data, tmp_path / "link", "is a link to nowhere, which does not exist")
    refused_training(data, tmp_path / "c", "cannot write the log", "/dev/full", log="/dev/full")
    refused_training(data, tmp_path / "d", "cannot write the log", log=tmp_path / "absent" / "log.jsonl")


def test_gradients_that_overflow(data, tmp_path):
    model = model_with(tmp_path / "model", change=overflowing(*(f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))))
    result = refused_training(data, tmp_path / "a", "5 steps in a row", "first in ", model=model, train_batch_size=4, max_steps=9)
    assert result.stdout.count("skipped: its loss or gradient is not finite") == 5
    assert [line["skipped"] for line in log_lines(tmp_path / "a")[1:]] == [1, 2, 3, 4]


def test_debug_names_the_first_op(data, tmp_path):
    model = model_with(tmp_path / "model", change=overflowing("model.layers.1.self_attn.v_proj.weight", "model.layers.1.self_attn.o_proj.weight"))
    for options in ({"dtype": "bf16"}, {"recompute": "layer", "ranks": 2, "ring_attn_size": 2}, {"ranks": 2, "zero_stage": 3}):
        result = refused_training(data, tmp_path / f"run {options}", "step 1 has a value that is not finite", model=model, max_steps=9, debug="true",
                                  **options)
        assert re.search(r"forward, layer 1, proj: element \d+ of act\.1\.ln2\n", result.stderr), (options, result.stderr)


def test_a_step_without_targets_is_skipped(tmp_path):
    documents = random_documents(4, longest=20)
    documents[1] = (documents[1][0], documents[1][1] * 0)
    data = write_data(tmp_path / "with.safetensors", documents)  # document 3 has a single token, which has no context
    options = {"train_batch_size": 1, "shuffle": "false", "lr_scheduler": "constant"}
    said = train(tmp_path / "a", data=data, eval_data=data, **options)
    assert "step 2 skipped: no token" in said and "step 4 skipped: no token" in said and "2 steps skipped" in said
    lines = [line for line in log_lines(tmp_path / "a") if "loss" in line]
    assert [(line["skipped"], line["loss"] is None) for line in lines] == [(0, False), (1, True), (1, False), (2, True)]
    # The other steps, including AdamW's step count, equal those of a run without these documents.
    train(tmp_path / "b", data=write_data(tmp_path / "without.safetensors", [documents[0], documents[2]]), **options)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


def test_held_out_documents_without_targets(tmp_path):
    documents = [(ids, mask * (i == 0)) for i, (ids, mask) in enumerate(random_documents(8, longest=20))]  # only document 0 has targets
    said = train(tmp_path / "a", data=write_data(tmp_path / "data.safetensors", documents), eval_fraction=0.125)
    assert "nothing to evaluate" in said and not any("eval_loss" in line for line in log_lines(tmp_path / "a"))


def test_a_full_disk_is_noticed_before_the_first_step(data, tmp_path):
    run = tmp_path / "a"
    words = command("sft", data=data, output_dir=run, max_len=64, save_steps=1)
    refused(words, "cannot write: File too large", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)))
    assert list(run.iterdir()) == []
    succeeds(words)  # the failed start left nothing that stops a second one
