"""Faults during runs: kills, full and read-only disks, flipped bits, data that changes, and power cuts. Saved files stay intact; a run ends with one
message or resumes with the same bits."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from runs import (
    OPTIMIZER, ROOT, SMALL, call, checkpoints, command, ends_with_one_message, log_lines, merging, preloaded, read_tensors, refused, same_run, start,
    start_training, steps_logged, succeeds, train, wait_for, weights)


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# ---- killed -----------------------------------------------------------------------------------------------------------------------

def test_killed_again_and_again(data, tmp_path):
    """A run that SIGKILL ends at its start, in a step or in a save can be resumed, and has the same bits at its end."""
    steps, kills = 40, 8
    straight, run = tmp_path / "straight", tmp_path / "run"
    options = {"data": data, "max_steps": steps, "save_steps": 1, "max_num": 2, "eval_data": data, "eval_steps": 2}
    begin = time.monotonic()
    train(straight, **options)
    whole = time.monotonic() - begin
    rng = random.Random(1)
    landed, inside = [], 0  # steps saved at each kill; kills inside a save

    def finished():
        same_run(run, straight)
        assert [line["step"] for line in log_lines(run)[1:] if "loss" in line] == list(range(1, steps + 1))
        assert files(run / "best") == files(straight / "best")
        assert checkpoints(run) == [steps - 1, steps]
        assert sorted(p.name for p in run.iterdir()) == sorted(p.name for p in straight.iterdir())  # the crashes leave nothing

    while len(landed) < kills:
        before = max(checkpoints(run), default=0)
        process = start_training(run, resume="auto", **options)
        if len(landed) % 2:
            try:
                process.wait(rng.uniform(0, whole / 3))
            except subprocess.TimeoutExpired:
                pass
        else:
            moment = before + rng.randrange(1, 8)
            wait_for(lambda: (run / f"step_{moment}.tmp").exists(), process)  # noqa: B023
        process.kill()
        error = process.communicate()[1]
        if process.returncode == 0:  # the run ended before the kill
            finished()
            shutil.rmtree(run)
            continue
        assert process.returncode == -signal.SIGKILL, error
        landed.append(max(checkpoints(run), default=0))
        inside += (run / f"step_{landed[-1] + 1}.tmp").exists()
        assert landed[-1] >= before  # saved steps are never lost
    assert inside >= kills // 4
    train(run, resume="auto", **options)
    finished()


def test_killed_merges_keep_the_users_files_and_leave_no_partial_model(data, tmp_path):
    """Merges with --overwrite into a directory that also has files of the user."""
    adapter, out, rng = tmp_path / "adapter", tmp_path / "out", random.Random(2)
    train(adapter, data=data, max_steps=1, lora_rank=4)
    words = merging("--overwrite", adapter=adapter, output_dir=out)
    begin = time.monotonic()
    succeeds(words)
    whole = time.monotonic() - begin
    mine = {out / name: os.urandom(8) for name in ("notes.txt", "model-00001-of-00003.safetensors", "sub/config.json")}
    for path, content in mine.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    for _ in range(8):
        process = start(words)
        try:
            process.wait(rng.uniform(0, whole))
        except subprocess.TimeoutExpired:
            process.kill()
        assert process.communicate()[1] == "" and process.returncode in (0, -signal.SIGKILL)
        assert not (out / "config.json").exists() or read_tensors(out / "model.safetensors")
    succeeds(words)
    assert read_tensors(out / "model.safetensors") and json.loads((out / "config.json").read_text())
    assert {path: path.read_bytes() for path in mine} == mine


# ---- output that is lost, or would replace a file --------------------------------------------------------------------------------------

@pytest.mark.parametrize("how", ["full", "closed", "no reader"])
@pytest.mark.parametrize("what", ["help", "plan", "eval", "prepare", "key"])
def test_lost_output_is_an_error(what, how, data):
    prepare, demo = ROOT / "data/prepare.py", ROOT / "data/demo"
    words = {"help": [str(ROOT / "train_llama"), "sft", "--help"], "plan": command("sft", "--plan", threads=None),
             "eval": command("eval", data=data, max_len=64),
             "prepare": [sys.executable, prepare, "--help"],
             "key": [sys.executable, "-u", prepare, "sft", "--input", demo / "prompts.jsonl", "--tokenizer", demo / "model", "--key"]}[what]
    line = {"full": '"$@" > /dev/full', "closed": '"$@" >&-', "no reader": '"$@" | true; exit ${PIPESTATUS[0]}'}[how]
    result = call(["bash", "-c", line, "bash", *words])
    if how == "no reader" and result.returncode == 0:
        return  # the program was faster than the reader's end
    assert result.returncode == 1 and result.stderr.count("not all output reached its file or pipe") == result.stderr.count("fix: ") == 1, result.stderr


def test_a_result_replaces_no_other_file(data, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    before = data.read_bytes()
    for flag in ("scores", "log"):
        refused(command("eval", data=data, max_len=64, **{flag: data}), f"--{flag}", "is what --data reads")
    refused(command("eval", data=data, max_len=64, scores=tmp_path / "notes.txt"), "exists, and no run wrote it")
    refused(command("eval", data=data, max_len=64, scores=tmp_path), "is a directory")
    refused(command("eval", data=data, max_len=64, scores="/dev/full"), "/dev/full", "No space left")
    refused(command("sft", data=data, max_len=64, output_dir=tmp_path / "a", log=tmp_path / "notes.txt"), "exists, and no run wrote it")
    (tmp_path / "link").symlink_to(tmp_path / "scores")
    (tmp_path / "scores.tmp").write_text("mine")
    for _ in range(2):  # the second call replaces the target of the link
        succeeds(command("eval", data=data, max_len=64, scores=tmp_path / "link"))
    assert (tmp_path / "link").is_symlink() and (tmp_path / "scores").read_text().startswith('{"document":0')
    assert (tmp_path / "scores.tmp").read_text() == "mine"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:  # a regular file below /dev
        succeeds(command("eval", data=data, max_len=64, scores=f"{memory}/scores"))
        assert Path(memory, "scores").read_bytes() == (tmp_path / "scores").read_bytes()
    assert data.read_bytes() == before and (tmp_path / "notes.txt").read_text() == "mine" and not (tmp_path / "a").exists()


# ---- disks ------------------------------------------------------------------------------------------------------------------------

def test_a_disk_that_fills_in_a_save(data, disk, tmp_path):
    disk, mount = disk
    straight, run, other = tmp_path / "straight", disk / "run", tmp_path / "other"
    options = {**SMALL, "data": data, "max_steps": 14, "save_steps": 1, "max_num": 99}
    train(straight, **options)
    ends_with_one_message(start_training(run, **options), f"{run}/step_", ".tmp", "No space left on device", "enough free space")
    saved = checkpoints(run)
    assert 2 <= len(saved) < 14 and saved == list(range(1, len(saved) + 1))
    assert not list(run.rglob("*.tmp"))
    for step in (saved[0], saved[-1]):
        shutil.rmtree(other, ignore_errors=True)
        train(other, resume=run / f"step_{step}", **options)
        assert weights(other) == weights(straight)
    assert mount("remount,size=64m")
    assert f"at step {saved[-1]}" in train(run, resume="auto", **options)
    same_run(run, straight)
    assert checkpoints(run) == list(range(1, 15))


def test_a_read_only_disk(data, disk):
    disk, mount = disk
    (disk / "run").mkdir()
    assert mount("remount,ro")
    for output in (disk / "run", disk / "new"):
        refused(command("sft", output_dir=output, data=data, **SMALL), str(output), "Read-only file system")


# ---- bits that flip ---------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def stopped(data, tmp_path_factory):
    """A run of 6 steps without the checkpoint of its last step, and the whole run."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    train(run, data=data, eval_data=data, max_steps=6, save_steps=2, max_num=9, eval_steps=4)
    straight = shutil.copytree(run, run.parent / "straight")
    shutil.rmtree(run / "step_6")
    return run, straight


@pytest.mark.parametrize("name", ["step_4/trainer_state.json", f"step_4/{OPTIMIZER}", "best/evaluation.json"])
def test_a_flipped_bit(name, data, stopped, tmp_path):
    """The message names the damaged file and how to resume without it. test_checkpoint.cpp flips bits in all files."""
    options = {**SMALL, "data": data, "eval_data": data, "max_steps": 6, "save_steps": 2, "max_num": 9, "eval_steps": 4, "resume": "auto"}
    run = shutil.copytree(stopped[0], tmp_path / "run")
    raw = bytearray((run / name).read_bytes())
    raw[len(raw) // 2] ^= 2
    (run / name).write_bytes(raw)
    fix = "move that directory away" if name.startswith("best/") else f"--resume {run}/step_2\n"
    refused(command("sft", output_dir=run, **options), f"{run}/{name}: ", f"fix: {fix}")
    if name.startswith("best/"):
        shutil.rmtree(run / "best")
    else:
        options["resume"] = run / "step_2"
    train(run, **options)
    same_run(run, stopped[1])


# ---- data that changes ------------------------------------------------------------------------------------------------------------

def test_data_that_changes_in_a_run(data, tmp_path):
    straight, run, own = tmp_path / "straight", tmp_path / "run", shutil.copy(data, tmp_path / "data.safetensors")
    options = {**SMALL, "data": own, "max_steps": 400, "ranks": 2}
    train(straight, **options)
    process = start_training(run, save_steps=100, max_num=9, **options)
    wait_for(lambda: steps_logged(run / "log.jsonl") >= 3, process)
    with open(own, "r+b") as file:  # ids outside the vocabulary
        file.seek(own.stat().st_size // 2)
        file.write(b"\xff" * 200)
    ends_with_one_message(process, str(own), "has changed since the run began")
    shutil.copy(data, own)
    train(run, **options, resume="auto")
    same_run(run, straight)


# ---- power cuts -----------------------------------------------------------------------------------------------------------

# Records each call of fsync with the file's path and size.
SYNC_SHIM = r"""
#include <cstdio>
#include <cstdlib>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

extern "C" int fsync(int fd) {
    char link[64], path[4096] = {};
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    struct stat info;
    if (readlink(link, path, sizeof(path) - 1) > 0 && fstat(fd, &info) == 0) {
        FILE *notes = fopen(getenv("SYNCED"), "a");
        fprintf(notes, "%s %ld\n", path, long(info.st_size));
        fclose(notes);
    }
    return int(syscall(SYS_fsync, fd));
}
"""


def test_the_log_is_synced_before_a_checkpoint_is_complete(data, tmp_path):
    """After a power cut only synced data exists: a checkpoint must not exist without the lines of its steps."""
    environment = {**preloaded(tmp_path, SYNC_SHIM), "SYNCED": str(tmp_path / "synced")}
    succeeds(command("sft", output_dir=tmp_path / "run", data=data, max_steps=4, save_steps=2, **SMALL), env=environment)
    log = (tmp_path / "run" / "log.jsonl").read_bytes()
    notes = [line.rsplit(" ", 1) for line in (tmp_path / "synced").read_text().splitlines()]
    synced, steps = 0, []  # synced bytes of the log; the last step in them at the time of each checkpoint
    for path, size in notes:
        if path == str(tmp_path / "run" / "log.jsonl"):
            synced = int(size)
        elif Path(path).name.startswith("trainer_state"):
            steps.append(json.loads(log[:synced].splitlines()[-1])["step"] if synced else None)
    assert steps == [2, 4]
    assert synced == len(log)


# ---- another machine ------------------------------------------------------------------------------------------------------------------


def test_a_program_for_another_cpu(tmp_path):
    """A program with instructions that this CPU lacks ends with a message, or runs NAME.plain if `make plain` has built it."""
    if not shutil.which("g++"):
        pytest.skip("no g++")
    (tmp_path / "main.cpp").write_text("int main() { return 0; }\n")
    built = subprocess.run(["g++", "-mavx512fp16", ROOT / "llmc/core/cpu.cpp", tmp_path / "main.cpp", "-o", tmp_path / "main"],
                           capture_output=True, text=True)
    if built.returncode:
        pytest.skip("not an x86 CPU")

    def run():
        return subprocess.run([tmp_path / "main", "a b", "c"], capture_output=True, text=True)

    if "avx512_fp16" in Path("/proc/cpuinfo").read_text():
        assert (run().returncode, run().stderr) == (0, "")
        return
    lacking = run()
    assert lacking.returncode == 1 and lacking.stderr.startswith("error: this program was compiled for a CPU with avx512fp16, which this one lacks")
    assert "fix: make plain" in lacking.stderr and "make clean && make" in lacking.stderr
    (tmp_path / "main.plain").write_text('#!/bin/sh\nprintf "%s, " "$@"; exit 3\n')
    (tmp_path / "main.plain").chmod(0o755)
    plain = run()
    assert (plain.returncode, plain.stdout, plain.stderr) == (3, "a b, c, ", "")
