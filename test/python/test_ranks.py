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
    random_documents, read_lines, read_tensors, refused, same_run, start, steps_logged, succeeds, trained, wait_for, write_data, write_lines)


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

SPLITS = {
    "3: 3 x 1": (3, {}),
    "4: 2 x 2, gather": (4, {"ring_attn_size": 2, "ring_attn_head_stride": 1, "zero_stage": 2}),
    "4: 1 x 4, ulysses": (4, {"ring_attn_size": 4, "sp_mode": "ulysses", "zero_stage": 1}),
    "6: 2 x 3, ring": (6, {"ring_attn_size": 3, "zero_stage": 2, "recompute": "layer"}),
    "6: 3 x 2, groups of 3": (6, {"ring_attn_size": 2, "zero_stage": 3, "zero_group": 3}),
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
    logs = [tmp_path / "threads.jsonl", tmp_path / "processes.jsonl"]
    evaluations = [command("eval", data=data, max_len=64, ring_attn_size=2, log=log) for log in logs]
    assert call([*evaluations[0], "--ranks", "2"]).returncode == call(processes(2, evaluations[1])).returncode == 0
    assert logs[0].read_text() == logs[1].read_text() != ""


def test_evaluation_equals_one_ranks(data, tmp_path):
    losses = []
    for ranks, options in ((1, {}), (4, {"ring_attn_size": 2}), (3, {"ring_attn_size": 3, "sp_mode": "gather"})):
        said = succeeds(command("eval", data=data, max_len=64, ranks=ranks, log=tmp_path / f"{ranks}.jsonl", **options))
        assert said.count("perplexity") == 1
        losses += read_lines(tmp_path / f"{ranks}.jsonl")
    for line in losses[1:]:
        near(line["eval_loss"], losses[0]["eval_loss"], 1e-6)
        assert [line[key] for key in ("eval_target_tokens", "eval_tokens")] == [losses[0][key] for key in ("eval_target_tokens", "eval_tokens")]


def test_ranks_wait_while_data_is_prepared(python_for_data, own_cache, tmp_path):
    records = write_lines(tmp_path / "x.jsonl", [{"prompt": f"a {n}", "completion": "b"} for n in range(9)])
    # Python runs this before anything else: preparing takes longer, asking for the key of the cache does not.
    (tmp_path / "sitecustomize.py").write_text("import sys, time\ntime.sleep(5 * ('--out' in sys.orig_argv))\n")
    words = sft(records, tmp_path / "run", model=DEMO, max_steps=1, ranks=2, comm_timeout=4)
    result = call(words, env={**ENVIRONMENT, "PYTHONPATH": str(tmp_path)})
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("documents kept") == 1


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
    for name, options in {"again": {}, "all": {"zero_group": 0, "zero_stage": 2}, "one": {"ranks": 1, "zero_group": 0}}.items():
        run = shutil.copytree(straight, tmp_path / name)
        trained(sft(data, run, **{**groups, **options, "resume": run / "step_4"}))
        if name == "again":
            same_run(run, straight)
        else:
            got, want = (log_lines(of)[-1] for of in (run, straight))
            assert got["step"] == want["step"] and got["loss"] == pytest.approx(want["loss"], rel=1e-2)
    shutil.rmtree(straight / "step_4")
    run = tmp_path / "to"
    trained(sft(data, run, **{**groups, "zero_group": 0, "zero_stage": 1}))
    trained(sft(data, run, **{**groups, "resume": run / "step_4"}))


def test_float_weights_are_exported_from_all_ranks(data, tmp_path):
    """Steps too small for bf16: only the lower halves of the weights know of them."""
    options = {"dtype": "bf16", "export_dtype": "f32", "max_steps": 3, "lr_scheduler": "constant", "learning_rate": 1e-6}
    exports = {}
    for ranks in (1, 4):
        trained(sft(data, tmp_path / str(ranks), ranks=ranks, **options))
        exports[ranks] = read_tensors(tmp_path / str(ranks) / "model.safetensors")
    safetensors = pytest.importorskip("safetensors.numpy")  # what transformers reads with
    read, before = safetensors.load_file(tmp_path / "4" / "model.safetensors"), read_tensors(GOLDEN / "qwen3" / "model.safetensors")
    assert read.keys() == exports[1].keys()
    for name, want in exports[1].items():
        assert read[name].dtype == np.float32 and (read[name] == exports[4][name]).all()
        assert np.abs(read[name] - want).max() <= 1e-5, name
        assert 1e-6 < np.abs(read[name] - before[name]).max() < 1e-5, name


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


def killed(data, tmp_path, ranks, kills):
    """Kills one rank at a random moment in each of some runs, which go on as threads."""
    rng = random.Random(ranks)
    straight = tmp_path / "straight"
    trained(sft(data, straight, ranks=ranks, **LONG))
    runs = [tmp_path / str(number) for number in range(kills)]
    killed_at = {}
    for together in range(0, kills, 3):
        started = [(run, start(processes(ranks, sft(data, run, **LONG)))) for run in runs[together:together + 3]]
        alive = {run: (process, rng.randrange(-1, 12)) for run, process in started}  # -1: before MPI has started
        while alive:
            for run, (process, moment) in list(alive.items()):
                assert process.poll() is None, process.communicate()
                if steps_logged(run / "log.jsonl") >= moment and len(ranks_of(run)) == ranks:
                    time.sleep(rng.uniform(0, 0.1))
                    os.kill(rng.choice(ranks_of(run)), signal.SIGKILL)
                    killed_at[run] = time.monotonic()
                    del alive[run]
            time.sleep(0.01)
        for run, process in started:
            code, said, error = ended(process, run, killed_at[run], within=30)
            assert code != 0, said + error
        for run, _ in started:  # after all have ended: the time that these take is not theirs
            trained(sft(data, run, ranks=ranks, resume="auto", **LONG))
            same_run(run, straight)
            assert sorted(path.name for path in run.iterdir()) == sorted(path.name for path in straight.iterdir())


@needs_mpi
def test_a_killed_rank_ends_the_run_which_goes_on(data, tmp_path):
    killed(data, tmp_path, ranks=4, kills=3)


@needs_mpi
@pytest.mark.slow
def test_a_rank_of_eight_killed_again_and_again(data, tmp_path):
    killed(data, tmp_path, ranks=8, kills=10)


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

@pytest.mark.parametrize("ranks, options, parts", [
    (4, {"ring_attn_size": 3}, ["--ring_attn_size 3 does not divide 4 ranks", "1, 2, 4"]),
    (2, {"ring_attn_size": 2, "ring_attn_head_stride": 3}, ["--ring_attn_head_stride 3 does not divide the model's 2 KV heads"]),
    (2, {"ring_attn_size": 2, "ring_attn_head_stride": 1, "sp_mode": "ring"}, ["--ring_attn_head_stride is for --sp_mode gather"]),
    (2, {"zero_stage": 5}, ["--zero_stage", "0, 1, 2 or 3"]),
    (4, {"zero_group": 3}, ["--zero_group 3 does not divide 4 ranks", "one of 2, 4"]),
    (2, {"comm_timeout": 0}, ["--comm_timeout", "above 0"]),
    (1, {"rank": "0/2"}, ["--rank and --rendezvous belong together"]),
    *((1, {"rank": rank, "rendezvous": "h:1"}, [f'--rank "{rank}" is not R/N']) for rank in ("0", "2/2", "-1/2", "0/0", "1/2/3", "1/99999999999999999999")),
])
def test_flags_of_ranks(ranks, options, parts, data, tmp_path):
    refused(sft(data, tmp_path / "run", ranks=ranks, **options), *parts)
    assert not (tmp_path / "run").exists()


def test_more_ranks_than_samples(tmp_path):
    data = write_data(tmp_path / "data.safetensors", random_documents(3))
    options = {"max_steps": 3, "train_batch_size": 2}
    trained(sft(data, tmp_path / "one", **options))
    trained(sft(data, tmp_path / "eight", ranks=8, ring_attn_size=2, zero_stage=2, **options))
    assert compare_logs(tmp_path / "eight", tmp_path / "one") == 3


def shard(model, directory, change):
    """Writes a copy of a model in one shard with an index, in which the lowest bit of a weight is set or not."""
    directory.mkdir()
    shutil.copy(model / "config.json", directory)
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[len(weights) // 2 // 4 * 4] = weights[len(weights) // 2 // 4 * 4] & 254 | change
    (directory / "model-00001-of-00001.safetensors").write_bytes(weights)
    names = set(json.loads(weights[8:8 + int.from_bytes(weights[:8], "little")])) - {"__metadata__"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}))


@pytest.fixture(scope="module")
def wrong(data, tmp_path_factory):
    """Wrong starts of two processes. Most of their time is mpirun's waiting, so they run together."""
    here, there = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("there")
    shutil.copy(data, here / "data.safetensors")
    for seed, directory in enumerate((here, there)):
        write_data(directory / "same_name.safetensors", random_documents(40, seed))
        # One id, or one byte of a shard, is another in the middle of a few MB.
        documents = random_documents(20000, longest=128)
        documents[10000][0][-1] = 5 + seed
        write_data(directory / "middle.safetensors", documents)
        shard(GOLDEN / "qwen3", directory / "model", seed)
    run = {name: here / name for name in ("path", "another", "middle", "weights", "flags", "task", "check", "ranks", "full")}
    full = ["bash", "-c", 'ulimit -f "$0"; exec "$@"']
    saves = sft(ROOT / "data/demo/train.safetensors", run["full"], model=DEMO, max_steps=1, save_steps=1, max_len=2048, max_samples=4)
    pretraining = [word if word != "sft" else "pretrain" for word in sft(data, run["task"])]
    starts = {
        "path": different((here, sft("data.safetensors", run["path"])), (there, sft("data.safetensors", run["path"]))),
        "another": different(*[(directory, sft("same_name.safetensors", run["another"])) for directory in (here, there)]),
        "middle": different(*[(directory, sft("middle.safetensors", run["middle"], max_len=128)) for directory in (here, there)]),
        "weights": different(*[(directory, sft(data, run["weights"], model="model")) for directory in (here, there)]),
        "flags": different((here, sft(data, run["flags"])), (here, sft(data, run["flags"], seed=7))),
        "task": different((here, sft(data, run["task"])), (here, pretraining)),
        "check": different((here, sft(data, run["check"])), (here, sft(data, run["check"], "--debug"))),
        "ranks": processes(2, sft(data, run["ranks"], ranks=4)),
        "full": different((here, saves), (here, [*full, "8192", *saves])),  # KiB: MPI itself takes 4, a shard 11 MiB
    }
    since = time.monotonic()
    started = {name: start(words) for name, words in starts.items()}
    return {name: (*ended(process, run[name], since, within=100), run[name]) for name, process in started.items()}


@needs_mpi
@pytest.mark.parametrize("name, parts", [
    ("path", ["rank 1: data.safetensors: cannot open: No such file", "fix: the path"]),
    ("another", ["same_name.safetensors is not the same file for rank 0 and for rank 1", "fix: the same files on all hosts"]),
    ("middle", ["middle.safetensors is not the same file for rank 0 and for rank 1", "fix: the same files on all hosts"]),
    ("weights", ["model/model-00001-of-00001.safetensors is not the same file for rank 0 and for rank 1", "fix: the same files on all hosts"]),
    ("flags", ["rank 0 was started with --seed 42, rank 1 with 7", "fix: the same command for every rank"]),
    ("task", ["rank 0 was started", "fix: the same command for every rank"]),
    ("check", ["rank 0 was started with --debug false, rank 1 with true", "fix: the same command for every rank"]),
    ("ranks", ["--ranks 4 makes ranks of threads, but mpirun has started 2 processes", "fix: one of the two"]),
    ("full", ["cannot write: File too large", "fix: a place with enough free space"]),
])
def test_processes_that_do_not_fit_together(name, parts, wrong):
    code, said, error, run = wrong[name]
    assert code != 0 and "saved" not in said
    for part in parts:
        assert error.count(part) == 1, error
    assert len(re.findall("^train_llama: ", error, re.MULTILINE)) == 1, error
    if run.exists():
        assert list(run.iterdir()) == []  # nothing that looks like a model or a checkpoint


@needs_mpi
def test_a_plan_is_for_the_ranks_that_mpirun_started():
    words = command("dpo", "--plan", ring_attn_size=2, ref_mode="resident")
    result = call(processes(2, words))
    assert result.returncode == 0 and result.stdout.count("2 ranks: 1 x data, 2 x sequence (ring), ZeRO stage 1;") == 1
    assert result.stdout.count("the reference model, resident") == 1
    assert "4 ranks: 2 x data, 2 x sequence" in call(processes(2, [*words, "--ranks", "4"])).stdout
    result = call(processes(2, [*words, "--loss_type", "sigmod"]))
    assert result.returncode != 0 and result.stderr.count('train_llama: there is no --loss_type "sigmod"') == 1
