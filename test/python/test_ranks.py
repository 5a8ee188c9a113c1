"""Whole runs of train_llama on ranks, threads and processes: what one rank computes, whatever the split; ends of ranks; wrong inputs."""

import json
import os
import random
import re
import shutil
import signal
import time

import numpy as np
import pytest
from runs import (
    DEMO, ENVIRONMENT, GOLDEN, PROGRAM, ROOT, call, checkpoints, command, compare_logs, log_lines, near, near_weights, needs_mpi, processes,
    random_documents, read_lines, read_tensors, same_run, start, steps_logged, trained, wait_for, write_data, write_lines)
from safetensors.numpy import load_file


def sft(data, output, *flags, **options):
    return command("sft", *flags, **{"data": data, "output_dir": output, "max_len": 64, "train_batch_size": 9, "learning_rate": 1e-3,
                                     "max_steps": 10, **options})


def different(*parts):
    """Ranks that are not started alike: (directory, words) of each."""
    words = []
    for directory, own in parts:
        words += [*([":"] if words else []), "-np", "1", "--wdir", str(directory), *own]
    return ["bash", str(ROOT / "scripts" / "launch.sh"), *words]


# ---- the same training ----------------------------------------------------------------------------------------------------------------

SPLITS = {  # test_ranks.cpp has all ways to split a step
    "4: 2 x 2, gather": (4, {"ring_attn_size": 2, "ring_attn_head_stride": 1, "zero_stage": 2}),
    "6: 2 x 3, ring, groups of 3": (6, {"ring_attn_size": 3, "zero_stage": 3, "zero_group": 3, "recompute": "layer"}),
    "8: 8 x 1, rings without a row": (8, {"zero_stage": 2, "row_tokens": 2048}),
}


@pytest.fixture(scope="module")
def one_rank(data, tmp_path_factory):
    run = tmp_path_factory.mktemp("one") / "run"
    trained(sft(data, run, eval_data=data))
    return run


@pytest.mark.parametrize("name", SPLITS)
def test_every_split_trains_as_one_rank(name, data, one_rank, tmp_path):
    ranks, options = SPLITS[name]
    said = trained(sft(data, tmp_path / "run", "--debug", ranks=ranks, eval_data=data, **options))
    assert said.count(f"{ranks} ranks: ") == 1
    assert compare_logs(tmp_path / "run", one_rank) == 14  # 10 steps, evaluations after the epochs' ends and the last
    assert log_lines(tmp_path / "run")[0]["world"] == ranks
    near_weights(tmp_path / "run", one_rank)


@needs_mpi
def test_processes_give_the_bits_of_threads(data, one_rank, tmp_path):
    options = {"eval_data": data, "ring_attn_size": 2, "zero_stage": 2}
    trained(sft(data, tmp_path / "threads", ranks=4, **options))
    trained(processes(4, sft(data, tmp_path / "processes", **options)))
    same_run(tmp_path / "threads", tmp_path / "processes")
    compare_logs(tmp_path / "processes", one_rank)
    log = tmp_path / "log.jsonl"
    assert call(processes(2, command("eval", data=data, model=one_rank, max_len=64, ring_attn_size=2, log=log))).returncode == 0
    near(read_lines(log)[-1]["eval_loss"], log_lines(one_rank)[-1]["eval_loss"], 1e-6)


def test_ranks_wait_while_data_is_prepared(own_cache, tmp_path):
    records = write_lines(tmp_path / "x.jsonl", [{"prompt": f"a {n}", "completion": "b"} for n in range(9)])
    # Python runs this before anything else: preparing takes longer than --comm_timeout, asking for the key of the cache does not.
    (tmp_path / "sitecustomize.py").write_text("import sys, time\ntime.sleep(5 * ('--out' in sys.orig_argv))\n")
    words = sft(records, tmp_path / "run", model=DEMO, max_steps=1, ranks=2, comm_timeout=4)
    result = call(words, env={**ENVIRONMENT, "PYTHONPATH": str(tmp_path)})
    assert result.returncode == 0 and result.stderr.count("documents kept") == 1, result.stderr


# ---- checkpoints ----------------------------------------------------------------------------------------------------------------------

EIGHT = {"ranks": 8, "ring_attn_size": 2, "zero_stage": 2, "save_steps": 4, "max_num": 9}


def test_resuming_on_any_number_of_ranks(data, tmp_path):
    straight = tmp_path / "straight"
    trained(sft(data, straight, **EIGHT))
    assert checkpoints(straight) == [4, 8]
    for ranks in (8, 1, 2, 3):
        options = EIGHT if ranks == 8 else {**EIGHT, "ranks": ranks, "ring_attn_size": 2 if ranks == 2 else 1, "zero_stage": ranks % 3}
        run = shutil.copytree(straight, tmp_path / str(ranks))
        said = trained(sft(data, run, **{**options, "resume": run / "step_4"}))
        assert "at step 4" in said
        if ranks == 8:
            same_run(run, straight)
        log = run / "log.jsonl"
        log.write_text("".join(line for line in log.read_text().splitlines(True) if json.loads(line).get("step", 0) > 4))
        assert compare_logs(run, straight) == 6


def test_groups_write_and_read_the_checkpoints_of_others(data, tmp_path):
    """In bf16, with moments that are rounded: a run that goes on with the same groups has the same bits."""
    groups = {"dtype": "bf16", "ranks": 4, "zero_stage": 3, "zero_group": 2, "save_steps": 4, "max_steps": 6}
    straight = tmp_path / "straight"
    trained(sft(data, straight, **groups))
    assert [file["name"] for file in json.loads((straight / "step_4" / "optimizer.json").read_text())["files"]] == [
        "optimizer-00000-of-00002.safetensors", "optimizer-00001-of-00002.safetensors"]
    for name, options in {"again": {}, "all": {"zero_group": 0, "zero_stage": 2, "save_steps": 5}}.items():
        run = shutil.copytree(straight, tmp_path / name)
        trained(sft(data, run, **{**groups, **options, "resume": run / "step_4"}))
        if name == "again":
            same_run(run, straight)
        else:
            near(log_lines(run)[-1]["loss"], log_lines(straight)[-1]["loss"], 1e-2)
            trained(sft(data, run, **{**groups, "resume": run / "step_5"}))


def test_float_weights_are_exported_from_all_ranks(data, tmp_path):
    """Steps too small for bf16: only the lower halves of the weights know of them."""
    options = {"dtype": "bf16", "export_dtype": "f32", "max_steps": 3, "lr_scheduler": "constant", "learning_rate": 1e-6}
    for ranks in (1, 4):
        trained(sft(data, tmp_path / str(ranks), ranks=ranks, **options))
    one, four = (load_file(tmp_path / str(ranks) / "model.safetensors") for ranks in (1, 4))
    before = read_tensors(GOLDEN / "qwen3" / "model.safetensors")
    assert one.keys() == four.keys() == before.keys()
    for name, want in one.items():
        assert four[name].dtype == np.float32 and np.abs(four[name] - want).max() <= 1e-5, name
        assert 1e-6 < np.abs(four[name] - before[name]).max() < 1e-5, name


# ---- ranks that end -------------------------------------------------------------------------------------------------------------------

def of_run(output):
    """The processes of a run, ranks and launcher, which have its directory among their arguments."""
    found = {}
    for path in os.listdir("/proc"):
        if path.isdigit():
            try:
                with open(f"/proc/{path}/cmdline", "rb") as file:
                    arguments = file.read().split(b"\0")
            except OSError:
                continue
            if os.fsencode(output) in arguments:
                found[int(path)] = os.path.basename(arguments[0]).decode()
    return found


def ranks_of(output):
    return sorted(pid for pid, program in of_run(output).items() if program == PROGRAM.name)


def ended(process, output, since, within):
    """Exit code, standard output and standard error of a run that ends within `seconds` and leaves no process."""
    said, error = process.communicate(timeout=within + 30)
    while of_run(output) and time.monotonic() - since < within:  # a rank that was killed may be dying still when mpirun has ended
        time.sleep(0.01)
    assert time.monotonic() - since < within and of_run(output) == {}, error
    return process.returncode, said, error


LONG = {"max_steps": 40, "save_steps": 5, "ring_attn_size": 2, "zero_stage": 2, "comm_timeout": 20}


@needs_mpi
def test_a_killed_rank_ends_the_run_which_goes_on(data, tmp_path):
    """One rank is killed at a random moment in each of three runs, which go on as threads."""
    rng, straight, killed_at = random.Random(4), tmp_path / "straight", {}
    trained(sft(data, straight, ranks=4, **LONG))
    alive = {tmp_path / str(number): moment for number, moment in enumerate((-1, 2, 9))}  # -1: before MPI has started
    started = {run: start(processes(4, sft(data, run, **LONG))) for run in alive}
    while alive:
        for run, moment in list(alive.items()):
            assert started[run].poll() is None, started[run].communicate()
            if steps_logged(run / "log.jsonl") >= moment and len(ranks_of(run)) == 4:
                time.sleep(rng.uniform(0, 0.1))
                os.kill(rng.choice(ranks_of(run)), signal.SIGKILL)
                killed_at[run] = time.monotonic()
                del alive[run]
        time.sleep(0.01)
    for run, process in started.items():
        code, said, error = ended(process, run, killed_at[run], within=30)
        assert code != 0, said + error
    for run in started:  # after all have ended: the time that these take is not theirs
        trained(sft(data, run, ranks=4, resume="auto", **LONG))
        same_run(run, straight)
        assert sorted(path.name for path in run.iterdir()) == sorted(path.name for path in straight.iterdir())


@needs_mpi
def test_signals_end_processes_in_good_order(data, tmp_path):
    """SIGTERM to launch.sh, and SIGUSR1 to mpirun: all ranks save, and a run that goes on does as if nothing had been."""
    straight = tmp_path / "straight"
    options = {**LONG, "max_steps": 200, "save_steps": 200}  # which do not end before the signal comes
    trained(sft(data, straight, ranks=4, **options))
    started = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        run = tmp_path / number.name
        process = start(processes(4, sft(data, run, **options)))
        started.append((run, process))
        wait_for(lambda: steps_logged(run / "log.jsonl") >= 3, process)  # noqa: B023
        mpirun = [pid for pid, program in of_run(run).items() if program.startswith("mpirun")]
        os.kill(process.pid if number == signal.SIGTERM else mpirun[0], number)
    for run, process in started:
        code, said, error = ended(process, run, time.monotonic(), within=30)
        assert code == 128 + signal.SIGUSR1, said + error
        assert said.count("stopped by signal") == 1
        last = log_lines(run)[-1]["step"]
        assert 3 <= last < 200 and checkpoints(run) == [last] and (run / "latest").read_text() == f"step_{last}\n"
        assert len(list((run / f"step_{last}").glob("optimizer-*"))) == 4
        trained(sft(data, run, ranks=4, resume="auto", **options))
        same_run(run, straight)


# ---- wrong inputs ---------------------------------------------------------------------------------------------------------------------

@needs_mpi
def test_processes_that_do_not_fit_together(data, tmp_path):
    """Most of the time of these starts of two processes is mpirun's waiting, so they run together."""
    here, there = tmp_path / "here", tmp_path / "there"
    for seed, directory in enumerate((here, there)):  # one id, or one byte of a model, is another in the middle
        directory.mkdir()
        documents = random_documents(200, longest=128)
        documents[100][0][-1] = 5 + seed
        write_data(directory / "middle.safetensors", documents)
        model = shutil.copytree(GOLDEN / "qwen3", directory / "model") / "model.safetensors"
        raw = bytearray(model.read_bytes())
        raw[len(raw) // 2] ^= seed
        model.write_bytes(raw)
    shutil.copy(data, here / "data.safetensors")
    full = sft(ROOT / "data/demo/train.safetensors", here / "full", model=DEMO, max_steps=1, save_steps=1, max_len=2048, max_samples=4)
    other_files, other_flags = "is not the same file for rank 0 and for rank 1\n  fix: the same files on all hosts", "fix: the same command for every rank"
    cases = {
        "path": (different(*[(directory, sft("data.safetensors", here / "path")) for directory in (here, there)]),
                 "rank 1: data.safetensors: cannot open: No such file", "fix: the path"),
        "middle": (different(*[(directory, sft("middle.safetensors", here / "middle", max_len=128)) for directory in (here, there)]),
                   f"middle.safetensors {other_files}"),
        "weights": (different(*[(directory, sft(data, here / "weights", model="model")) for directory in (here, there)]),
                    f"model/model.safetensors {other_files}"),
        "flags": (different((here, sft(data, here / "flags")), (here, sft(data, here / "flags", seed=7))),
                  "rank 0 was started with --seed 42, rank 1 with 7", other_flags),
        "task": (different(*[(here, [task if word == "sft" else word for word in sft(data, here / "task")]) for task in ("sft", "pretrain")]),
                 "rank 0 was started", other_flags),
        "ranks": (processes(2, sft(data, here / "ranks", ranks=4)),
                  "--ranks 4 makes ranks of threads, but mpirun has started 2 processes", "fix: one of the two"),
        "full": (different((here, full), (here, ["bash", "-c", 'ulimit -f "$0"; exec "$@"', "8192", *full])),  # KiB: MPI itself takes 4, a shard 11 MiB
                 "cannot write: File too large", "fix: a place with enough free space"),
    }
    since = time.monotonic()
    started = {name: start(words) for name, (words, *_) in cases.items()}
    for name, process in started.items():
        code, said, error = ended(process, here / name, since, within=100)
        assert code != 0 and "saved" not in said and len(re.findall("^train_llama: ", error, re.MULTILINE)) == 1, error
        assert all(error.count(part) == 1 for part in cases[name][1:]), error
        assert not (here / name).exists() or list((here / name).iterdir()) == []  # nothing that looks like a model or a checkpoint


@needs_mpi
def test_a_plan_is_for_the_ranks_that_mpirun_started():
    result = call(processes(2, command("dpo", "--plan", ring_attn_size=2, ref_mode="resident")))
    assert result.returncode == 0 and result.stdout.count("2 ranks: 1 x data, 2 x sequence (ring), ZeRO stage 1;") == 1
    assert result.stdout.count("the reference model, resident") == 1
