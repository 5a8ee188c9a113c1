"""Whole runs of train_llama on ranks, as threads and as processes: both have the same bits, a rank that ends stops the others, and calls that do not
fit together are refused. test_same_bits.py compares ranks with one rank."""

import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import time

import pytest
from runs import (
    DEMO, ENVIRONMENT, GOLDEN, PROGRAM, ROOT, call, checkpoints, command, log_lines, near, needs_mpi, processes, random_documents, read_lines,
    same_run, start, steps_logged, succeeds, trained, wait_for, write_data, write_lines)


def sft(data, output, *flags, **options):
    return command("sft", *flags, **{"data": data, "output_dir": output, "max_len": 64, "train_batch_size": 9, "learning_rate": 1e-3,
                                     "max_steps": 10, **options})


def different(*parts):
    """The command for ranks with a directory and words of their own: (directory, words) of each."""
    starts = (f"{rank}) cd {shlex.quote(str(directory))} && exec {shlex.join(map(str, own))} ;;" for rank, (directory, own) in enumerate(parts))
    return processes(len(parts), ["bash", "-c", f"case ${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}} in {' '.join(starts)} esac"])


# ---- threads and processes-------------------------------------------------------------------------------------------------------------

@needs_mpi
def test_processes_give_the_bits_of_threads(data, tmp_path):
    options, threads = {"eval_data": data, "ring_attn_size": 2, "zero_stage": 2}, tmp_path / "threads"
    said = trained(sft(data, threads, "--debug", ranks=4, **options))
    assert said.count("4 ranks: ") == 1 and log_lines(threads)[0]["world"] == 4
    trained(processes(4, sft(data, tmp_path / "processes", **options)))
    same_run(threads, tmp_path / "processes")
    log = tmp_path / "log.jsonl"
    assert call(processes(2, command("eval", data=data, model=threads, max_len=64, ring_attn_size=2, log=log))).returncode == 0
    near(read_lines(log)[-1]["eval_loss"], log_lines(threads)[-1]["eval_loss"], 1e-6)


def test_ranks_wait_while_data_is_prepared(own_cache, tmp_path):
    records = write_lines(tmp_path / "x.jsonl", [{"prompt": f"a {n}", "completion": "b"} for n in range(9)])
    # Python runs this file at its start: preparation takes longer than --comm_timeout; the request for the cache's key does not.
    (tmp_path / "sitecustomize.py").write_text("import sys, time\ntime.sleep(5 * ('--out' in sys.orig_argv))\n")
    words = sft(records, tmp_path / "run", model=DEMO, max_steps=1, ranks=2, comm_timeout=4)
    result = call(words, env={**ENVIRONMENT, "PYTHONPATH": str(tmp_path)})
    assert result.returncode == 0 and result.stderr.count("documents kept") == 1, result.stderr


# ---- ranks that end -------------------------------------------------------------------------------------------------------------------

def of_run(output):
    """The processes of a run, ranks and launcher, found by the run's directory among their arguments."""
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
    """Exit code, standard output and standard error of a run that must end within `within` seconds without leaving a process."""
    said, error = process.communicate(timeout=within + 30)
    while of_run(output) and time.monotonic() - since < within:  # a killed rank may end after mpirun
        time.sleep(0.01)
    assert time.monotonic() - since < within and of_run(output) == {}, error
    return process.returncode, said, error


LONG = {"max_steps": 40, "save_steps": 5, "ring_attn_size": 2, "zero_stage": 2, "comm_timeout": 20}


@needs_mpi
def test_a_killed_rank_ends_the_run_and_the_run_resumes(data, tmp_path):
    """In each of two runs one rank is killed at a random moment; the runs resume with threads."""
    rng, straight, killed_at = random.Random(4), tmp_path / "straight", {}
    trained(sft(data, straight, ranks=4, **LONG))
    alive = {tmp_path / str(number): moment for number, moment in enumerate((-1, 5))}  # -1: before MPI has started
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
    for run in started:  # after all have ended, so that resuming takes no time from them
        trained(sft(data, run, ranks=4, resume="auto", **LONG))
        same_run(run, straight)
        assert sorted(path.name for path in run.iterdir()) == sorted(path.name for path in straight.iterdir())


@needs_mpi
def test_a_signal_lets_all_processes_save_and_end(data, tmp_path):
    """SIGTERM to launch.sh, and SIGUSR1 to mpirun: all ranks save, and the resumed run equals an uninterrupted one."""
    straight = tmp_path / "straight"
    options = {**LONG, "max_steps": 200, "save_steps": 200}  # long enough for the signal to arrive
    trained(sft(data, straight, ranks=4, **options))
    started = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        run = tmp_path / number.name
        process = start(processes(4, sft(data, run, **options)))
        started.append((run, process))
        wait_for(lambda: steps_logged(run / "log.jsonl") >= 3, process)  # noqa: B023
        mpirun = [pid for pid, program in of_run(run).items() if program.startswith(("mpirun", "prterun"))]
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
    """All cases run at the same time, because mpirun mostly waits."""
    here, there = tmp_path / "here", tmp_path / "there"
    for seed, directory in enumerate((here, there)):  # they differ in one id of the data and in one byte of a model
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
    other_files, other_flags = "is not the same file for rank 0 and for rank 1\n  fix: copy the same files to all hosts", "fix: start every rank with the same command"
    cases = {
        "path": (different(*[(directory, sft("data.safetensors", here / "path")) for directory in (here, there)]),
                 "rank 1: data.safetensors: cannot open: No such file", "fix: give the path"),
        "middle": (different(*[(directory, sft("middle.safetensors", here / "middle", max_len=128)) for directory in (here, there)]),
                   f"middle.safetensors {other_files}"),
        "weights": (different(*[(directory, sft(data, here / "weights", model="model")) for directory in (here, there)]),
                    f"model/model.safetensors {other_files}"),
        "flags": (different((here, sft(data, here / "flags")), (here, sft(data, here / "flags", seed=7))),
                  "rank 0 was started with --seed 42, rank 1 with 7", other_flags),
        "task": (different(*[(here, [task if word == "sft" else word for word in sft(data, here / "task")]) for task in ("sft", "pretrain")]),
                 "rank 0 was started", other_flags),
        "ranks": (processes(2, sft(data, here / "ranks", ranks=4)),
                  "--ranks 4 makes ranks of threads, but mpirun has started 2 processes", "fix: leave out --ranks or mpirun"),
        "full": (different((here, full), (here, ["bash", "-c", 'ulimit -f "$0"; exec "$@"', "8192", *full])),  # KiB: MPI needs 4 MiB, a shard 11 MiB
                 "cannot write: File too large", "fix: give a place with enough free space"),
    }
    since = time.monotonic()
    started = {name: start(words) for name, (words, *_) in cases.items()}
    for name, process in started.items():
        code, said, error = ended(process, here / name, since, within=100)
        assert code != 0 and "saved" not in said and len(re.findall("^train_llama: ", error, re.MULTILINE)) == 1, error
        assert all(error.count(part) == 1 for part in cases[name][1:]), error
        assert not (here / name).exists() or list((here / name).iterdir()) == []  # no model and no checkpoint


@needs_mpi
def test_a_plan_is_for_the_ranks_that_mpirun_started():
    result = call(processes(2, command("dpo", "--plan", ring_attn_size=2, ref_mode="resident")))
    assert result.returncode == 0 and result.stdout.count("2 ranks: 1 x data, 2 x sequence (ring), ZeRO stage 1;") == 1
    assert result.stdout.count("the reference model, resident") == 1


# ---- launchers whose processes do not find each other -----------------------------------------------------------------------------------

SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
STEP = {**SLURM, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}


@pytest.mark.parametrize("variables, what", [
    ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "mpirun of MPICH or Intel MPI has started 2 processes"), ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ""),
    ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"}, "mpirun of MVAPICH has started 2 processes"), (STEP, "srun has started 2 processes"),
    (TORCHRUN, "torchrun or a similar launcher has started 2 processes"), ({**TORCHRUN, "RANK": "1"}, "")])
def test_processes_that_do_not_find_each_other_are_refused(variables, what, data, tmp_path):
    """The first one says so."""
    result = subprocess.run(command("sft", data=data, output_dir=tmp_path / "run", max_steps=1), env={**ENVIRONMENT, **variables}, capture_output=True,
                            text=True, timeout=60)
    assert result.returncode == 1 and not (tmp_path / "run").exists(), result.stdout + result.stderr
    assert result.stderr.startswith(f"train_llama: {what}") and result.stderr.count("fix: ") == 1 if what else result.stderr == ""


@pytest.mark.parametrize("variables", [SLURM, {**STEP, "SLURM_STEP_NUM_TASKS": "1"}, {"WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": "2"},
                                       {**TORCHRUN, "WORLD_SIZE": "1"}])
def test_a_process_alone_in_an_allocation_runs(variables, data, tmp_path):
    succeeds(command("sft", data=data, output_dir=tmp_path / "run", max_steps=1), env={**ENVIRONMENT, **variables})
