"""Whole runs of train_llama on the tiny models of test/golden: resuming, stopping, logging, and every way to call it wrong."""

import fcntl
import json
import math
import os
import re
import resource
import shutil
import signal
import time

import numpy as np
import pytest
from runs import (
    DEMO, FAMILIES, GOLDEN, PROGRAM, ROOT, SMALL, checkpoints, command, evaluate, expect_as_transformers, expect_resumed, log_lines, model_with, near,
    overflowing, random_documents, read_lines, refused, refused_training, same_run, start, steps_logged, succeeds, summary, train, wait_for, weights,
    write_data, write_lines)


def files_below(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# ---- resuming ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("change", [
    {}, {"dtype": "bf16"}, {"dtype": "bf16", "moments": "bf16"}, {"moments": "8bit"},
    {"dtype": "bf16", "optimizer": "muon", "moments": "bf16", "weight_decay": 0.1},
    {"dtype": "bf16", "grad_dtype": "bf16", "moments": "bf16", "row_tokens": 64}, {"eval_fraction": 0.2, "eval_steps": 2},
    {"train_batch_size": None, "train_batch_tokens": 150}, {"shuffle": "false", "weight_decay": 0.1},
], ids=lambda change: " ".join(map(str, change.values())) or "f32")
def test_resuming_gives_the_same_bits(change, data, tmp_path):
    """23 samples: 6 steps of 4 make an epoch, the checkpoint of step 4 is in the first one and the end in the second."""
    def run(output, **more):
        return train(output, **{**SMALL, "data": data, "max_steps": 9, "max_num": 9, **change, **more})

    straight, stopped = expect_resumed(run, tmp_path, at=4)
    assert checkpoints(stopped) == [4, 8] and any(line.get("epoch", 0) > 1 for line in log_lines(straight))
    assert "at step 8" in run(stopped, save_steps=4, resume="auto")
    same_run(stopped, straight)


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
    assert [line["loss"] for line in log_lines(tmp_path / "3") if "loss" in line] == pytest.approx(losses, rel=1e-5)


def test_resuming_into_another_directory(data, tmp_path):
    options = {"data": data, "max_steps": 4, "train_batch_size": 4}
    train(tmp_path / "a", save_steps=2, **options)
    train(tmp_path / "b", resume=tmp_path / "a" / "step_2", **options)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    assert [line.get("step") for line in log_lines(tmp_path / "b")][:3] == [None, 3, 4]  # its log also begins with the description
    refused_training(data, tmp_path / "b", "already holds a run", resume=tmp_path / "a" / "step_2", train_batch_size=4)


def test_a_changed_run_is_not_resumed(data, tmp_path):
    run, options = tmp_path / "a", {"max_steps": 2, "train_batch_size": 4, "resume": "auto"}
    train(run, data=data, save_steps=2, **options | {"resume": None})
    before = weights(run)
    for change in ({"seed": 7}, {"train_batch_size": 5}, {"dtype": "bf16"}, {"optimizer": "muon"}, {"shuffle": "false"}, {"eval_fraction": 0.3},
                   {"max_samples": 9}, {"train_batch_size": None, "train_batch_tokens": 100}):
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


# ---- stopping ---------------------------------------------------------------------------------------------------------------------

def test_signals_end_a_run_in_good_order(data, tmp_path):
    """SIGINT, SIGTERM, SIGUSR1 and SIGHUP, one after the other, in one resumed run."""
    straight, run = tmp_path / "straight", tmp_path / "run"
    options = {**SMALL, "data": data, "max_steps": 400, "train_batch_size": 8}
    train(straight, **options)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        done = len(log_lines(run)) if run.exists() else 0
        # The pipe holds about 50 lines of steps, so that a run cannot end before it has got its signal.
        process = start(command("sft", output_dir=run, resume="auto", **options), pipesize=4096)
        wait_for(lambda: steps_logged(run / "log.jsonl") >= done + 2, process)  # noqa: B023
        process.send_signal(number)
        said, error = process.communicate(timeout=60)
        assert error == "" and process.returncode == 128 + number, said
        last = log_lines(run)[-1]["step"]
        assert last < 400
        assert "stopped by signal" in said and f"after step {last}" in said and "--resume auto" in said
        assert (run / "latest").read_text() == f"step_{last}\n"
    train(run, resume="auto", **options)
    same_run(run, straight)


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
    written = files_below(run).keys()
    mine = {run / name: os.urandom(8) for name in ("notes.txt", "model-00001-of-00002.safetensors", "step_2/plot.png", "step_2/old/config.json",
                                                   "step_9/config.json")}
    for path, content in mine.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    train(run, "--overwrite", data=data, max_steps=1)
    kept = {run / name for name in ("config.json", "generation_config.json", "model.safetensors", "log.jsonl", "run_files.json")}
    assert files_below(run).keys() & written == kept
    train(run, "--overwrite", data=data, max_steps=2, save_steps=1)  # next to the leftovers of step_2
    assert files_below(run).items() >= mine.items() and (run / "step_2" / "trainer_state.json").exists()
    (run / "tokenizer.json").write_text("mine")
    refused_training(data, run, "step_9", "no run wrote it", "move it away", words=["--overwrite"], max_steps=9)
    assert weights(run) and files_below(run).items() >= mine.items()


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
    before = files_below(run)
    refused_training(data, run, "already holds a run", "--resume auto", "--overwrite")
    refused_training(tmp_path / "absent.safetensors", run, "absent.safetensors", words=["--overwrite"])  # a mistake costs nothing
    model = shutil.copytree(GOLDEN / "qwen3", tmp_path / "model")
    for flag in ("--debug", "--overwrite", "--resume=auto"):
        refused_training(data, model, "is not empty", "it holds ", model=model, words=[flag])
    assert files_below(model) == {model / path.name: path.read_bytes() for path in (GOLDEN / "qwen3").iterdir()}

    other_run = os.open(run, os.O_RDONLY)
    fcntl.flock(other_run, fcntl.LOCK_EX)
    for flag in ("--overwrite", "--resume=auto"):
        refused_training(data, run, str(run), "another run is writing there", words=[flag])
    assert files_below(run) == before
    patient = start(command("sft", "--overwrite", output_dir=run, data=data, max_steps=1, seed=7))
    time.sleep(1)
    assert patient.poll() is None  # the other one may have been killed, and not have ended yet
    os.close(other_run)
    assert patient.communicate(timeout=60)[1] == "" and patient.returncode == 0
    assert checkpoints(run) == [] and not (run / "latest").exists()
    assert [line.get("step") for line in log_lines(run)][:2] == [None, 1]


def test_the_log(data, tmp_path):
    train(tmp_path / "a", data=data, max_epochs=2, eval_data=data)
    first, *lines = log_lines(tmp_path / "a")
    assert first["task"] == "sft" and first["options"]["learning_rate"] == 1e-3 and first["device"] == "cpu" and first["world"] == 1
    assert first["model"]["family"] == "qwen3" and first["model"]["parameters"] == 27872
    assert first["plan_bytes"] > 0 and first["steps"] == 12
    steps, evals = [line for line in lines if "loss" in line], [line for line in lines if "eval_loss" in line]
    wanted = "step epoch loss grad_norm lr samples tokens target_tokens tok_s step_s mfu peak_mem entropy mean_token_accuracy"
    for line in steps:
        assert set(wanted.split()) <= set(line), line
        assert line["loss"] > 0 and line["grad_norm"] > 0 and line["mfu"] is None and line["peak_mem"] > 0
    assert [line["step"] for line in steps] == list(range(1, 13)) and [line["step"] for line in evals] == [6, 12]
    assert steps[5]["epoch"] == 1 and steps[11]["epoch"] == 2
    documents = random_documents(23)
    assert steps[-1]["samples"] == 46
    assert steps[-1]["tokens"] == 2 * sum(len(ids) for ids, _ in documents)
    assert steps[-1]["target_tokens"] == 2 * sum(int(mask.sum()) for _, mask in documents) == 2 * evals[0]["eval_target_tokens"]
    assert evals[1]["eval_loss"] < evals[0]["eval_loss"] < steps[0]["loss"]
    near(evals[0]["eval_perplexity"], math.exp(evals[0]["eval_loss"]), 1e-12)
    last = summary(tmp_path / "a")
    assert last.items() >= {"steps": 12, **{name: steps[-1][name] for name in ("samples", "tokens", "target_tokens")}, "skipped": 0, "loss_spikes": 0,
                            "restarts": 0, "best_step": 12, "best_eval_loss": evals[1]["eval_loss"]}.items()
    assert last["peak_mem"] >= steps[-1]["peak_mem"]
    seconds = sum(line["step_s"] for line in steps)
    near(last["tok_s"], last["tokens"] / seconds, 1e-9)
    assert last["hours"] * 3600 > seconds


BECOMES_TOO_LARGE = {"eval_steps": 2, "learning_rate": 1, "lr_scheduler": "linear", "lr_warmup": 0.9, "save_steps": 2,
                     "max_num": 99}  # the rate


def test_the_best_model_is_kept(data, tmp_path):
    """The best evaluation is not the last. Resumed after it, at it and before it, it is the same."""
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
    assert summary(run)["restarts"] == 1  # each time from a checkpoint of the first run
    train(run, "--overwrite", **options)
    assert not (run / "best").exists() and "best_step" not in summary(run)


def test_a_run_ends_where_its_evaluations_become_no_better(data, tmp_path):
    """Resumed after the best evaluation, the run ends at the same step."""
    run, options = tmp_path / "a", {**BECOMES_TOO_LARGE, "data": data, "max_steps": 40, "early_stopping_patience": 3}
    said = train(run, eval_data=data, **options)
    best = summary(run)["best_step"]
    assert [line["step"] for line in log_lines(run) if "eval_loss" in line][-1] == summary(run)["steps"] == best + 6 < 40
    assert f"stopped after step {best + 6}: 3 evaluations in a row were no better than that of step {best}" in said
    end = weights(run)
    train(run, eval_data=data, resume=run / f"step_{best + 2}", **options)
    assert weights(run) == end
    refused(command("sft", **options, output_dir=tmp_path / "b"), "--early_stopping_patience", "--eval_data")


def test_logging_steps_and_another_log_file(data, tmp_path):
    log = tmp_path / "b.jsonl"
    train(tmp_path / "a", data=data, max_steps=5, logging_steps=2, log=log)
    assert not (tmp_path / "a" / "log.jsonl").exists()
    assert [line.get("step") for line in read_lines(log)] == [None, 2, 4, 5, None]


def test_steps_as_a_share_of_a_run_of_unknown_length(data, tmp_path):
    """A share of all steps is rounded up, as in transformers, and is the number of steps that it stands for."""
    options, runs = {"data": data, "eval_data": data, "max_epochs": 3, "max_num": 99}, [tmp_path / "shares", tmp_path / "numbers"]
    shares = {"save_steps": 0.3, "eval_steps": 0.4, "logging_steps": 0.15, "lr_warmup": 0.25}
    train(runs[0], **shares, **options)
    counts = {name: math.ceil(share * summary(runs[0])["steps"]) for name, share in shares.items()}
    assert len(set(counts.values())) > 2
    train(runs[1], **counts, **options)
    same_run(*runs)
    assert checkpoints(runs[0]) == checkpoints(runs[1]) and checkpoints(runs[0])[0] == counts["save_steps"]


# ---- models in and out ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["llama3", "qwen2", "smollm2"])
def test_the_saved_model_reads_back(name, data, tmp_path):
    train(tmp_path / "a", data=data, model=GOLDEN / name, max_epochs=1, eval_data=data)
    last = log_lines(tmp_path / "a")[-1]
    assert evaluate(tmp_path / "a", data, tmp_path, max_len=64)["eval_loss"] == last["eval_loss"]


@pytest.mark.parametrize("name", FAMILIES)
def test_eval_equals_transformers(name, tmp_path):
    expect_as_transformers(name, evaluate(GOLDEN / name, GOLDEN / name / "golden.safetensors", tmp_path))


def test_random_weights_depend_on_the_seed_alone(data, tmp_path):
    blank = tmp_path / "blank"
    blank.mkdir()
    shutil.copy(GOLDEN / "qwen3" / "config.json", blank)
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        train(tmp_path / name, data=data, model=blank, max_steps=1, seed=seed, lr_warmup=1)  # the first rate is 0
    assert weights(tmp_path / "a") == weights(tmp_path / "b") != weights(tmp_path / "c")


def test_raw_data_needs_the_tree(tmp_path):
    program = shutil.copy(PROGRAM, tmp_path / "train_llama")
    questions = write_lines(tmp_path / "questions.jsonl", [{"prompt": "1 + 1 =", "completion": " 2"}])
    refused(command("sft", program=program, data=questions, model=DEMO, output_dir=tmp_path / "out"), "questions.jsonl is raw data",
            f"{tmp_path}/data/prepare.py, which prepares it, does not exist")


def test_train_the_demo_and_generate(python_for_data, own_cache, tmp_path):
    from preparing import prepared  # loads transformers, which takes a while

    model = tmp_path / "a"
    train(model, data=ROOT / "data" / "demo" / "train.safetensors", model=DEMO, max_steps=2, max_len=2048)
    assert (model / "tokenizer.json").read_bytes() == (DEMO / "tokenizer.json").read_bytes()
    prompts = prepared(tmp_path / "prompts", "prompts", [{"prompt": "one"}, {"prompt": "two and three"}], model)

    def generated(**options):
        return succeeds(command("generate", model=model, max_new_tokens=5, **options), quiet=False)

    def answers(**options):
        return [json.loads(line) for line in generated(prompts=prompts, temperature=1, **options).splitlines() if line.startswith("{")]

    assert generated(prompt="sort: 3 1 2") == generated(prompt="sort: 3 1 2") != ""
    assert [line["tokens"] <= 5 for line in answers()] == [True, True]
    three = answers(n=3)
    assert [line["sample"] for line in three] == [0, 1, 2] * 2 and len({line["completion"] for line in three}) > 2
    assert all(line["finish_reason"] == "length" and line["tokens"] == 5 or line["finish_reason"] == "stop" for line in three)
    assert answers(n=3, max_sequences=1) == answers(n=3, ranks=2, max_sequences=2) == three
    refused(command("generate", model=model, prompts=prompts, n=0), "--n is 0", "at least 1")
    refused(command("generate", model=model, prompts=prompts, max_sequences=0), "--max_sequences is 0")
    refused(command("sft", model=DEMO, data=prompts, output_dir=tmp_path / "b", n=2), "--n belongs to grpo, ppo, generate")


def test_a_broken_line_of_raw_data_is_named(python_for_data, own_cache, tmp_path):
    (tmp_path / "x.jsonl").write_text(2 * '{"prompt": "a", "completion": "b"}\n' + '{"prompt": "a", \n')
    result = refused(command("sft", model=DEMO, data=tmp_path / "x.jsonl", output_dir=tmp_path / "a"), "record 3 (line 3) of ", "x.jsonl")
    assert len(result.stderr.splitlines()) == 2 and not (tmp_path / "a" / "log.jsonl").exists()


# ---- wrong input ------------------------------------------------------------------------------------------------------------------

def test_a_truncated_shard(data, tmp_path):
    model = shutil.copytree(GOLDEN / "llama3", tmp_path / "model")
    shard = model / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    refused_training(data, tmp_path / "a", "model-00002-of-00002.safetensors", model=model)


def test_data_that_does_not_fit(tmp_path):
    data, documents = tmp_path / "data.safetensors", random_documents(4)
    write_data(data, [(np.array([5, last, 7]), np.array([0, 1, 1])) for last in (6, 96)], vocab=200)
    refused_training(data, tmp_path / "a", "document 1", "token id 96 at position 1", "vocabulary of 96")
    write_data(data, [*documents[:2], (np.full(65, 5), np.arange(65) > 0)])
    refused_training(data, tmp_path / "a", "document 2", "65 tokens", "64")
    refused(command("eval", data=data, max_len=64), "document 2", "65 tokens")
    without_targets = [(ids, mask * 0) for ids, mask in documents]
    refused_training(write_data(data, without_targets), tmp_path / "a", "none of its", "is a target")
    write_data(data, without_targets, kind="prompts")
    refused_training(data, tmp_path / "a", "holds prompts")
    refused(command("eval", data=data), "holds prompts")


def test_paths(data, tmp_path):
    (tmp_path / "file").write_text("x")
    refused_training(data, tmp_path / "file", "is a file")
    refused_training(data, tmp_path / "file" / "b", "cannot create")
    assert (tmp_path / "file").read_text() == "x"
    (tmp_path / "link").symlink_to("nowhere")
    refused_training(data, tmp_path / "link", "is a link to nowhere, which does not exist")
    refused_training(data, tmp_path / "c", "cannot write the log", "/dev/full", log="/dev/full")
    refused_training(data, tmp_path / "d", "cannot write the log", log=tmp_path / "absent" / "log.jsonl")


def test_nan_in_the_weights(data, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    model = model_with(tmp_path / "model", change=lambda tensors: np.put(tensors[name], 3, np.nan))
    refused_training(data, tmp_path / "a", name, "NaN", model=model)
    refused(command("eval", data=data, model=model), name, "NaN")


def test_gradients_that_overflow(data, tmp_path):
    model = model_with(tmp_path / "model", change=overflowing("model.layers.1.mlp.down_proj.weight"))
    result = refused_training(data, tmp_path / "a", "5 steps in a row", "first in ", model=model, train_batch_size=4, max_steps=9)
    assert result.stdout.count("skipped: its loss or gradient is not finite") == 5
    assert [line["skipped"] for line in log_lines(tmp_path / "a")[1:]] == [1, 2, 3, 4]


@pytest.mark.parametrize("tensor, first", [
    ("layers.1.mlp.down_proj", r"forward, layer 1, down: element \d+ of act\.2\.x\n"),
    ("layers.0.self_attn.v_proj", r"forward, layer 0, qkv: element \d+ of act\.0\.qkv\n"),
    ("layers.1.self_attn.o_proj", r"forward, layer 1, proj: element \d+ of act\.1\.ln2\n"),
])
def test_debug_names_the_first_op(tensor, first, data, tmp_path):
    model = model_with(tmp_path / "model", change=overflowing(f"model.{tensor}.weight"))
    for options in ({}, {"dtype": "bf16"}, {"recompute": "layer"}, {"ranks": 2, "ring_attn_size": 2}, {"ranks": 2, "zero_stage": 2},
                    {"ranks": 2, "zero_stage": 3}):
        result = refused_training(data, tmp_path / f"run {options}", "step 1 has a value that is not finite", model=model, max_steps=9, debug="true",
                                  **options)
        assert re.search(first, result.stderr), (options, result.stderr)


def test_a_step_without_targets_is_skipped(tmp_path):
    documents = random_documents(4, longest=20)
    documents[1] = (documents[1][0], documents[1][1] * 0)
    data = write_data(tmp_path / "with.safetensors", documents)  # document 3 has one token, which nothing predicts, either
    options = {"train_batch_size": 1, "shuffle": "false", "lr_scheduler": "constant"}
    said = train(tmp_path / "a", data=data, eval_data=data, **options)
    assert "step 2 skipped: no token" in said and "step 4 skipped: no token" in said and "2 steps skipped" in said
    lines = [line for line in log_lines(tmp_path / "a") if "loss" in line]
    assert [(line["skipped"], line["loss"] is None) for line in lines] == [(0, False), (1, True), (1, False), (2, True)]
    # The other steps, AdamW's step count included, are the same as without it.
    train(tmp_path / "b", data=write_data(tmp_path / "without.safetensors", [documents[0], documents[2]]), **options)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


def test_nothing_to_evaluate_is_said(tmp_path):
    documents = [(ids, mask * (i == 0)) for i, (ids, mask) in enumerate(random_documents(8, longest=20))]  # only document 0 has targets
    data, said = write_data(tmp_path / "data.safetensors", documents), []
    for seed in range(8):  # which documents are held out depends on it
        said.append("nothing to evaluate" in train(tmp_path / str(seed), data=data, eval_fraction=0.5, seed=seed))
        assert said[-1] != any("eval_loss" in line for line in log_lines(tmp_path / str(seed)))
    assert set(said) == {True, False}


def test_a_full_disk_is_noticed_before_the_first_step(data, tmp_path):
    run = tmp_path / "a"
    words = command("sft", data=data, output_dir=run, max_len=64, save_steps=1)
    refused(words, "cannot write: File too large", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)))
    assert list(run.iterdir()) == []
    succeeds(words)  # with room it runs, and nothing is in its way
