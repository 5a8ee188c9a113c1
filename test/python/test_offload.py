"""Runs that offload activations, moments and weights to a disk: the same bits, and one message for each fault of a disk."""

import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from runs import (
    GOLDEN, OF_PAIRS, SMALL, call, change_json, command, ends_with_one_message, log_lines, preloaded, refused, refused_training, stable,
    start_training, steps_logged, train, wait_for, weights)

ALL = "activations,optimizer,weights"


@pytest.fixture
def place(tmp_path):
    path = tmp_path / "place"
    path.mkdir()
    yield path
    assert list(path.iterdir()) == []  # whatever has happened


def lines_of(run):
    """Log lines without the bytes of sent weights: offloaded weights are gathered in parts."""
    return [{key: value for key, value in line.items() if key != "sent_params"} for line in stable(log_lines(run))]


def same_training(run, straight):
    assert weights(run) == weights(straight)
    assert lines_of(run) == lines_of(straight)


@pytest.mark.parametrize("more", [{"recompute": "layer"}, {"recompute": "none", "ranks": 2, "zero_stage": 2, "dtype": "bf16"},
                                  {"recompute": "cheap", "grad_dtype": "bf16", "neftune_noise_alpha": 5}])
def test_the_bits_are_those_of_a_run_in_memory(more, data, place, tmp_path):
    options = {"data": data, "max_steps": 8, "eval_data": data, "eval_steps": 3, **more}
    train(tmp_path / "straight", **options)
    assert log_lines(tmp_path / "straight")[0]["offloaded_bytes"] == 0
    for what in ("activations", "optimizer", "weights", ALL):
        run = tmp_path / what
        assert re.search(rf"offloaded: [\d.]+ [KM]iB to a file in {place}", train(run, offload=what, offload_dir=place, **options))
        same_training(run, tmp_path / "straight")
        assert log_lines(run)[0]["offloaded_bytes"] > 0


@pytest.mark.parametrize("what, more", [("activations,optimizer", {"load_in": "4bit", "grad_dtype": "bf16", "ranks": 2}), (ALL, {}),
                                        (ALL, {"ranks": 3, "zero_stage": 2, "dtype": "bf16"})])
def test_adapters_beside_a_base_that_is_quantised_or_not_there(what, more, data, place, tmp_path):
    options = {"data": data, "max_steps": 4, "lora_rank": 4, "lora_dropout": 0.1, "eval_data": data, "eval_steps": 2, **more}
    train(tmp_path / "straight", **options)
    train(tmp_path / "run", offload=what, offload_dir=place, **options)
    same_training(tmp_path / "run", tmp_path / "straight")


ANSWERS = {"rollout_batch_size": 6, "n": 32, "max_new_tokens": 1, "max_len": 67, "train_batch_size": 64}
TASKS = {  # with references, critics and answers: whatever else reads weights
    "dpo": {**OF_PAIRS, "ref_mode": "resident", "ranks": 2, "zero_stage": 3},
    "rm": {**OF_PAIRS, "ranks": 3, "zero_stage": 1},
    "grpo": {**ANSWERS, "kl_coef": 0.1, "ranks": 2, "zero_stage": 2},
    "grpo ahead": {**ANSWERS, "async_steps": 1, "ranks": 2, "dtype": "bf16"},
    "ppo": {**ANSWERS, "ranks": 2, "zero_stage": 3},
}


@pytest.mark.parametrize("name", TASKS)
def test_every_task(name, data, prompts, place, tmp_path):
    options = {"data": prompts if name.split()[0] in ("grpo", "ppo") else data, "max_steps": 4, "task": name.split()[0], **TASKS[name]}
    train(tmp_path / "straight", **options)
    train(tmp_path / "run", offload="weights", offload_dir=place, **options)
    same_training(tmp_path / "run", tmp_path / "straight")


@pytest.mark.parametrize("moments", ["f32", "8bit"])
def test_a_checkpoint_is_that_of_a_run_in_memory(moments, data, place, tmp_path):
    """Either kind of run goes on from the other's."""
    options = {"data": data, "max_steps": 9, "moments": moments, "save_steps": 3}
    offload = {"offload": ALL, "offload_dir": place}
    train(tmp_path / "straight", **options)
    train(tmp_path / "run", **options, **offload)
    same_training(tmp_path / "run", tmp_path / "straight")
    for name, source, more in (("in", "run", {}), ("out", "straight", offload)):
        train(tmp_path / name, resume=tmp_path / source / "step_3", **options, **more)
        assert weights(tmp_path / name) == weights(tmp_path / "straight")


def test_killed_at_random_moments(data, place, tmp_path):
    options = {"data": data, "max_steps": 40, "save_steps": 1, "max_num": 2, "offload": ALL, "offload_dir": place}
    begin = time.monotonic()
    train(tmp_path / "straight", **options)
    whole, rng, kills = time.monotonic() - begin, random.Random(1), 0
    while kills < 12:
        process = start_training(tmp_path / "run", resume="auto", **options)
        time.sleep(rng.uniform(0, whole / 3))
        process.kill()
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        assert list(place.iterdir()) == []
        if process.returncode == 0:
            same_training(tmp_path / "run", tmp_path / "straight")
            break
    train(tmp_path / "run", resume="auto", **options)
    same_training(tmp_path / "run", tmp_path / "straight")


def test_a_disk_without_room(data, disk, tmp_path):
    path, mount = disk
    assert mount("remount,size=64k")
    output = tmp_path / "out"
    ends_with_one_message(start_training(output, data=data, offload=ALL, offload_dir=path), f"{path}: there is no room for the ",
                          "that --offload needs: No space left on device", "--offload_dir on a larger disk")
    assert not list(output.glob("step_*")) and list(path.iterdir()) == []


@pytest.mark.parametrize("what", ["optimizer", "weights"])
def test_a_file_that_somebody_changes(what, data, place, tmp_path):
    """It has no name, but the system lets root reach it."""
    output = tmp_path / "out"
    process = start_training(output, data=data, max_epochs=100000, offload=what, offload_dir=place)
    wait_for(lambda: steps_logged(output / "log.jsonl") > 3, process)
    [found] = [link for link in Path(f"/proc/{process.pid}/fd").iterdir() if str(link.readlink()).startswith(str(place))]
    with open(found, "r+b", buffering=0) as file:
        while process.poll() is None:
            file.seek(100)
            file.write(b"x" * 8)
    ends_with_one_message(process, f"{place}: an offloaded array has come back with other bytes than had left, in the block at byte 0",
                          "--resume auto")


HANGS = """
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool hangs(const char *call) { return getenv("HANGS") && !strcmp(getenv("HANGS"), call); }

extern "C" int open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    const int mode = va_arg(more, int);
    va_end(more);
    if ((flags & O_TMPFILE) == O_TMPFILE && hangs("open")) pause();
    return ((int (*)(const char *, int, int))dlsym(RTLD_NEXT, "open"))(path, flags, mode);
}

extern "C" ssize_t pread(int file, void *to, size_t bytes, off_t at) {
    if (bytes % 4096 == 0 && (uintptr_t)to % 4096 == 0 && hangs("read")) pause();
    return ((ssize_t(*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread"))(file, to, bytes, at);
}
"""


@pytest.mark.parametrize("where", ["open", "read"])
def test_a_directory_that_does_not_answer(where, data, place, tmp_path):
    environment = {**preloaded(tmp_path, HANGS), "HANGS": where}
    words = command("sft", output_dir=tmp_path / "out", data=data, comm_timeout=2, offload=ALL, offload_dir=place, recompute="layer",
                    **SMALL)
    refused(words, f"{place}: the directory of --offload has not answered for 2 seconds", env=environment, timeout=20)


@pytest.fixture
def memory():
    """limit(bytes) makes a group of processes that get no more memory, and returns the file that takes the number of one."""
    groups = []

    def limit(size):
        for root, file in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
            group = Path(root) / f"train_llama.{os.getpid()}"
            try:
                group.mkdir()
                groups.append(group)
                (group / file).write_text(str(size))
                return group / "cgroup.procs"
            except OSError:
                continue
        pytest.skip("no group with a limit of memory can be made here")

    yield limit
    for group in groups:
        group.rmdir()


def large_model(directory):
    """A model of 113 million parameters, without weights."""
    directory.mkdir()
    shutil.copy(GOLDEN / "llama3/config.json", directory)
    change_json(directory / "config.json", hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
                num_key_value_heads=12, head_dim=64)
    return directory


def limited(procs, output, **options):
    return call(command("sft", output_dir=output, **options), timeout=300, preexec_fn=lambda: procs.write_text(str(os.getpid())))


@pytest.mark.slow
def test_a_model_of_one_and_a_half_times_the_memory(data, memory, place, tmp_path):
    """Its parameters, gradients and moments are that large. Its gradients, three eighths of it, stay in memory."""
    options = {"model": large_model(tmp_path / "model"), "data": data, "max_steps": 3, "dtype": "f32", **SMALL}
    straight, run = tmp_path / "straight", tmp_path / "run"
    train(straight, **options)
    parameters = log_lines(straight)[0]["model"]["parameters"]
    procs = memory(int(16 * parameters / 1.5))
    assert limited(procs, tmp_path / "killed", **options).returncode == -signal.SIGKILL
    result = limited(procs, run, offload=ALL, offload_dir=place, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    same_training(run, straight)


@pytest.mark.slow
def test_adapters_of_a_model_that_is_larger_than_the_memory(data, memory, place, tmp_path):
    model = tmp_path / "trained"
    train(model, model=large_model(tmp_path / "model"), data=data, max_steps=1, dtype="f32", **SMALL)
    options = {"model": model, "data": data, "max_steps": 3, "dtype": "f32", "lora_rank": 4, **SMALL}
    straight, run = tmp_path / "straight", tmp_path / "run"
    train(straight, **options)
    size = (model / "model.safetensors").stat().st_size
    procs = memory(int(0.9 * size))
    assert limited(procs, tmp_path / "killed", **options).returncode == -signal.SIGKILL
    result = limited(procs, run, offload="weights", offload_dir=place, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (run / "adapter_model.safetensors").read_bytes() == (straight / "adapter_model.safetensors").read_bytes()


def test_what_is_refused(data, tmp_path):
    refused_training(data, tmp_path / "out", "--offload on a CPU needs a disk", "--offload_dir DIR", offload="activations")
    refused_training(data, tmp_path / "out", '--offload is "weight"', "one of activations,optimizer,weights", offload="weight", offload_dir=tmp_path)
    refused_training(data, tmp_path / "out", "the matrices that --load_in 4bit makes small stay in memory", "leave weights out of --offload",
                     offload=ALL, offload_dir=tmp_path, load_in="4bit", lora_rank=4)
    refused_training(data, tmp_path / "out", "has no effect without --offload", "--offload activations", offload_dir=tmp_path)
    refused_training(data, tmp_path / "out", f"{tmp_path}/none: cannot create a file for --offload: No such file or directory",
                     offload=ALL, offload_dir=tmp_path / "none")
    refused(command("sft", "--plan", gpu="h100", preset="llama3.2-1b", model=None, device=None, threads=None, offload=ALL,
                    offload_dir=tmp_path), "a GPU offloads to the host's memory", "leave --offload_dir out")
