"""Runs that survive: killed, on a disk that fills or may no longer be written to, with bits that flip and data that changes. Saved files stay intact, and a fault ends in one message, or the run goes on with the same result."""

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
    OPTIMIZER, ROOT, SMALL, call, checkpoints, command, ends_with_one_message, log_lines, merging, preloaded, random_documents,
    read_tensors, refused, same_run, start, start_training, steps_logged, succeeds, train, wait_for, weights, write_data)


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# ---- killed -----------------------------------------------------------------------------------------------------------------------

def test_killed_again_and_again(data, tmp_path):
    """Wherever SIGKILL strikes, in a step, in a save or while starting: the run can be resumed, and ends in the same bits."""
    steps, kills = 40, 12
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
        assert sorted(p.name for p in run.iterdir()) == sorted(p.name for p in straight.iterdir())  # nothing is left of the crashes

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
        if process.returncode == 0:  # this one made it to the end: kill another
            finished()
            shutil.rmtree(run)
            continue
        assert process.returncode == -signal.SIGKILL, error
        landed.append(max(checkpoints(run), default=0))
        inside += (run / f"step_{landed[-1] + 1}.tmp").exists()
        assert landed[-1] >= before  # saved steps stay
    assert inside >= kills // 4
    train(run, resume="auto", **options)
    finished()


def test_a_kill_costs_no_file_of_the_user_s_and_leaves_no_half_model(data, tmp_path):
    """With --overwrite, again and again into a directory that also has files of the user."""
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


def test_a_restart_while_the_run_still_saves_goes_on_from_there(data, tmp_path):
    straight, run = tmp_path / "straight", tmp_path / "run"
    options = {"data": data, "max_steps": 400}
    train(straight, **options)
    for _ in range(3):
        process = start_training(run, resume="auto", **options)
        done = steps_logged(run / "log.jsonl")
        wait_for(lambda: steps_logged(run / "log.jsonl") > done + 2, process)  # noqa: B023
        process.terminate()
        again = start_training(run, resume="auto", **options)
        assert process.wait(60) == 128 + signal.SIGTERM
        stopped = checkpoints(run)[-1]
        wait_for(lambda: steps_logged(run / "log.jsonl") > stopped + 2, again)  # noqa: B023
        again.terminate()
        said = again.communicate(timeout=60)[0]
        assert f"resumed from {run}/step_{stopped} at step {stopped}" in said, said
        process.communicate()
    train(run, resume="auto", **options)
    same_run(run, straight)


# ---- output that does not arrive -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("how", ["full", "closed", "no reader"])
@pytest.mark.parametrize("what", ["help", "plan", "eval", "prepare"])
def test_what_is_printed_arrives_or_the_exit_code_is_1(what, how, data):
    words = {"help": [str(ROOT / "train_llama"), "sft", "--help"], "plan": command("sft", "--plan", threads=None),
             "eval": command("eval", data=data, max_len=64),
             "prepare": [sys.executable, str(ROOT / "data/prepare.py"), "--help"]}[what]
    line = {"full": '"$@" > /dev/full', "closed": '"$@" >&-', "no reader": '"$@" | true; exit ${PIPESTATUS[0]}'}[how]
    result = call(["bash", "-c", line, "bash", *words])
    if how == "no reader" and result.returncode == 0:
        return  # it was quicker
    assert result.returncode == 1 and result.stderr.count("not all output reached its file or pipe") == result.stderr.count("fix: ") == 1, result.stderr


def test_a_result_takes_no_other_file_s_place(data, tmp_path):
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
    for _ in range(2):  # the second time the file that the link leads to is replaced
        succeeds(command("eval", data=data, max_len=64, scores=tmp_path / "link"))
    assert (tmp_path / "link").is_symlink() and (tmp_path / "scores").read_text().startswith('{"document":0')
    assert (tmp_path / "scores.tmp").read_text() == "mine"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:  # files there are no devices
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
    saved = checkpoints(run)  # a name with .tmp would be an error
    assert 2 <= len(saved) < 14 and saved == list(range(1, len(saved) + 1))
    assert not list(run.rglob("*.tmp"))
    for step in saved:
        shutil.rmtree(other, ignore_errors=True)
        train(other, resume=run / f"step_{step}", **options)
        assert weights(other) == weights(straight)
    assert mount("remount,size=64m")
    assert f"at step {saved[-1]}" in train(run, resume="auto", **options)
    same_run(run, straight)
    assert checkpoints(run) == list(range(1, 15))


def test_a_disk_that_may_not_be_written_to(data, disk):
    disk, mount = disk
    (disk / "run").mkdir()
    assert mount("remount,ro")
    for output in (disk / "run", disk / "new"):
        refused(command("sft", output_dir=output, data=data, **SMALL), str(output), "Read-only file system")


# ---- bits that flip ---------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def stopped(data, tmp_path_factory):
    """A run of 6 steps as a crash after step 5 leaves it."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    train(run, data=data, eval_data=data, max_steps=6, save_steps=2, max_num=9, eval_steps=4)
    straight = shutil.copytree(run, run.parent / "straight")
    shutil.rmtree(run / "step_6")
    return run, straight


USED = ["step_4/trainer_state.json", "step_4/optimizer.json", f"step_4/{OPTIMIZER}", "best/evaluation.json"]
UNUSED = ["step_4/model.safetensors", "step_4/config.json", "best/model.safetensors"]


@pytest.mark.parametrize("name", USED + UNUSED)
def test_a_flipped_bit(name, data, stopped, tmp_path):
    """It is noticed where resuming uses it, and the message tells how to go on; where nothing uses it, it changes nothing."""
    options = {**SMALL, "data": data, "eval_data": data, "max_steps": 6, "save_steps": 2, "max_num": 9, "eval_steps": 4, "resume": "auto"}
    run = shutil.copytree(stopped[0], tmp_path / "run")
    raw = bytearray((run / name).read_bytes())
    raw[len(raw) // 2] ^= 2
    (run / name).write_bytes(raw)
    if name in USED:
        on = "move that directory away" if name.startswith("best/") else f"--resume {run}/step_2\n"
        refused(command("sft", output_dir=run, **options), f"{run}/{name}: ", f"fix: {on}")
        if name.startswith("best/"):
            shutil.rmtree(run / "best")
        else:
            options["resume"] = run / "step_2"
    train(run, **options)
    same_run(run, stopped[1])


# ---- data that changes ------------------------------------------------------------------------------------------------------------

def overwrite(path):
    """With ids that no model has, in place."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * 200)


@pytest.mark.parametrize("change, message", [(overwrite, "has changed since the run began"), (lambda path: os.truncate(path, 100), "ends at byte")],
                         ids=["overwritten", "truncated"])
def test_data_that_changes_in_a_run(change, message, data, tmp_path):
    straight, run, own = tmp_path / "straight", tmp_path / "run", shutil.copy(data, tmp_path / "data.safetensors")
    options = {**SMALL, "data": own, "max_steps": 400, "ranks": 2}
    train(straight, **options)
    process = start_training(run, save_steps=100, max_num=9, **options)
    wait_for(lambda: steps_logged(run / "log.jsonl") >= 3, process)
    change(own)
    ends_with_one_message(process, str(own), message)
    shutil.copy(data, own)
    train(run, **options, resume="auto")
    same_run(run, straight)


def test_data_that_is_replaced_in_a_run(data, tmp_path):
    """The run reads the file that it began with, and is not resumed with the new one."""
    straight, run, own = tmp_path / "straight", tmp_path / "run", shutil.copy(data, tmp_path / "data.safetensors")
    options = {**SMALL, "data": own, "max_steps": 400, "save_steps": 100}
    train(straight, **options)
    process = start_training(run, **options)
    wait_for(lambda: steps_logged(run / "log.jsonl") >= 3, process)
    os.replace(write_data(tmp_path / "new.safetensors", random_documents(30, seed=9)), own)
    assert process.communicate(timeout=60)[1] == "" and process.returncode == 0
    same_run(run, straight)
    refused(command("sft", output_dir=run, resume="auto", **options), "was made with data")


# ---- power cuts -----------------------------------------------------------------------------------------------------------

# Notes each file that is synced, and its size.
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


def test_no_checkpoint_outlives_the_log_of_its_steps(data, tmp_path):
    """A power cut leaves only synced data. Before a checkpoint is complete, the lines of its steps are; at the end all lines are."""
    environment = {**preloaded(tmp_path, SYNC_SHIM), "SYNCED": str(tmp_path / "synced")}
    succeeds(command("sft", output_dir=tmp_path / "run", data=data, max_steps=4, save_steps=2, **SMALL), env=environment)
    log = (tmp_path / "run" / "log.jsonl").read_bytes()
    notes = [line.rsplit(" ", 1) for line in (tmp_path / "synced").read_text().splitlines()]
    synced, steps = 0, []  # bytes of the log so far; of each checkpoint the last step in them, when its trainer state is written
    for path, size in notes:
        if path == str(tmp_path / "run" / "log.jsonl"):
            synced = int(size)
        elif Path(path).name.startswith("trainer_state"):
            steps.append(json.loads(log[:synced].splitlines()[-1])["step"] if synced else None)
    assert steps == [2, 4]
    assert synced == len(log)


# ---- another machine ------------------------------------------------------------------------------------------------------------------


def test_a_program_of_another_cpu(tmp_path):
    """Compiled for instructions of some servers only; on other CPUs the program of `make plain` runs instead."""
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
