"""Helpers for tests of whole runs of train_llama and train_gpt2: data, calls, logs and files."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "data"), str(ROOT / "scripts")]

from token_file import TokenFile  # noqa: E402
from worker import parent_of  # noqa: E402
from worker import processes as processes_here  # noqa: E402

PROGRAM = ROOT / "train_llama"
GOLDEN = ROOT / "test" / "golden"
DEMO = ROOT / "data" / "demo" / "model"
PAIRS = GOLDEN / "pairs.safetensors"
# data/prepare.py runs with this python3; ranks of one host need no TCP, and Open MPI 5 warns of interfaces that do not reach each other.
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMPI_MCA_btl": "^tcp"}
OPTIMIZER = "optimizer-00000-of-00001.safetensors"  # in a checkpoint of one rank
VARYING = ("tok_s", "step_s", "peak_mem", "peak_mem_min", "mfu", "compute_s", "comm_s", "optimizer_s", "generation_s", "kl_s",
           "generation_tok_s")  # fields of a log line with times and memory
SMALL = {"max_len": 64, "train_batch_size": 4, "learning_rate": 1e-3}  # options for random_documents
OF_PAIRS = {"data": PAIRS, "max_len": 64, "row_tokens": 128, "train_batch_size": 10}
needs_mpi = pytest.mark.skipif(not PROGRAM.exists() or b"MPI_Init_thread" not in PROGRAM.read_bytes() or not shutil.which("mpirun"),
                               reason="built without MPI, or no mpirun")


# ---- data -------------------------------------------------------------------------------------------------------------------------

def write_data(path, documents, kind="sft", vocab=96, labels=(), columns=()):
    """Writes prepared data. documents: a list of (ids, mask). labels: of kind unpaired. columns: of kind rl, JSON texts."""
    file = TokenFile(str(path), vocab)
    ids, masks = zip(*documents)
    file.append(np.concatenate(ids), np.concatenate(masks), np.array([len(d) for d in ids]), labels=labels, columns=columns)
    file.write({"kind": kind, "vocab_size": str(vocab)})
    file.close()
    return path


def write_judged(path):
    """The golden pairs as single answers with labels."""
    arrays = read_tensors(PAIRS)
    tokens, mask, offsets = (arrays[name] for name in ("tokens", "loss_mask", "doc_offsets"))
    documents = [(tokens[a:b], mask[a:b]) for a, b in zip(offsets, offsets[1:])]
    return write_data(path, documents, kind="unpaired", labels=np.arange(len(documents)) % 2 == 0)


def random_documents(count, seed=0, longest=60):
    """(ids, mask) of documents with a pattern to learn. A few have no target, and one has a single token."""
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


def chat(*texts, roles=("user", "assistant"), keys=("role", "content")):
    """Messages that alternate between user and assistant."""
    return [{keys[0]: roles[i % 2], keys[1]: text} for i, text in enumerate(texts)]


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- calls ------------------------------------------------------------------------------------------------------------------------

def command(task, *flags, model=GOLDEN / "qwen3", program=None, **options):
    """The words of a call with flags as keywords. By default one thread, because these matrices are too small for two, and the CPU, even with a GPU."""
    options = {"model": model, "threads": 1, "device": "cpu", **options}
    words = [str(program or PROGRAM), task, *flags]
    for name, value in options.items():
        words += [] if value is None else [f"--{name}", str(value)]
    return words


def merging(*flags, **options):
    return command("merge", *flags, threads=None, device=None, **options)


def processes(ranks, words):
    """The command for ranks as processes."""
    return ["bash", str(ROOT / "scripts" / "launch.sh"), "-np", str(ranks), *words]


def call(words, **more):
    """The result of a call, with text; generated text may be invalid UTF-8."""
    return subprocess.run(words, capture_output=True, text=True, errors="replace", **{"env": ENVIRONMENT, "timeout": 120, **more})


def start(words, **more):
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", env=ENVIRONMENT, **more)


def descendants(process):
    """The ids of the child processes of a process, of their child processes, and so on."""
    parents = {pid: parent_of(pid) for pid in processes_here()}
    found = [process]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def expect_end_of(processes):
    for process in processes:
        for _ in range(600):
            if not Path(f"/proc/{process}").exists():
                break
            time.sleep(0.05)
        else:
            raise AssertionError(f"process {process} has not ended")


def wait_for(what, process):
    while process.poll() is None and not what():
        time.sleep(0.001)


def succeeds(words, quiet=True, **more):
    """The standard output of a call that must succeed. If quiet, it must print no errors; the preparation of raw data prints a table there."""
    result = call(words, **more)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == "" or not quiet
    return result.stdout


def train(output, *flags, task="sft", **options):
    return succeeds(command(task, *flags, **{**SMALL, "output_dir": output, **options}))


def refused(words, *parts, **more):
    """The result of a call that must end with exit code 1 and one message with a cause and a fix."""
    result = call(words, **more)
    assert result.returncode == 1, (result.returncode, result.stdout, result.stderr)
    expect_one_message(result.stderr, *parts)
    return result


def expect_one_message(error, *parts):
    assert error.startswith("train_llama: ") and error.count("train_llama: ") == error.count("fix: ") == 1, error
    for part in parts:
        assert part in error, (part, error)


def refused_training(data, output, *parts, words=(), **options):
    return refused(command("sft", *words, **{"data": data, "output_dir": output, "max_len": 64, **options}), *parts)


# ---- files of a run -----------------------------------------------------------------------------------------------------------------

def weights(directory):
    """The weights of a model in one file, or of an adapter."""
    [file] = directory.glob("*model.safetensors")
    return file.read_bytes()


def log_lines(output):
    """The lines of the log without the summary at the end."""
    return [line for line in read_lines(output / "log.jsonl") if "summary" not in line]


def summary(output):
    return read_lines(output / "log.jsonl")[-1]["summary"]


def stable(lines):
    return [{key: value for key, value in line.items() if key not in VARYING} for line in lines if "step" in line]


def first_step(output):
    return log_lines(output)[1]


def steps_logged(log):
    return log.read_bytes().count(b"\n") - 1 if log.exists() else -1


def checkpoints(output):
    """The steps of the complete checkpoints."""
    return sorted(int(path.name[5:]) for path in output.glob("step_*") if path.name[5:].isdigit())


def same_run(run, straight):
    assert weights(run) == weights(straight)
    assert stable(log_lines(run)) == stable(log_lines(straight))


def near(got, want, relative, absolute=0.0):
    assert math.isclose(got, want, rel_tol=relative, abs_tol=absolute), (got, want)


def evaluate(model, data, tmp_path, **options):
    """The log line of eval."""
    log = tmp_path / "eval.jsonl"
    succeeds(command("eval", model=model, data=data, log=log, **{"max_len": 128, **options}), quiet=False)
    return read_lines(log)[-1]


# ---- ranks ------------------------------------------------------------------------------------------------------------------------

def trained(words):
    """The standard output of a run that must succeed, with lines of rank 0 alone."""
    result = call(words)
    assert result.returncode == 0, result.stdout + result.stderr
    noise = [line for line in result.stderr.splitlines() if not line.startswith("OMP_NUM_THREADS=")]  # printed by launch.sh
    assert noise == [], result.stderr
    for once in ("parameters, ", "saved ", "ZeRO stage", "resumed from"):
        assert result.stdout.count(once) <= 1, result.stdout
    assert result.stdout.count("saved ") == 1
    return result.stdout


# ---- models -----------------------------------------------------------------------------------------------------------------------

def header_of(path):
    """The header of a .safetensors file, and the offset of its arrays."""
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:begin]), begin


def read_tensors(path):
    """{name: array}, with bf16 as float."""
    header, begin = header_of(path)
    header.pop("__metadata__", None)
    raw = path.read_bytes()[begin:]
    dtypes = {"F32": "<f4", "BF16": "<u2", "I32": "<i4", "U16": "<u2", "U8": "u1", "I64": "<i8"}
    arrays = {name: np.frombuffer(raw[slice(*info["data_offsets"])], dtypes[info["dtype"]]).reshape(info["shape"]) for name, info in header.items()}
    return {name: (values.astype("<u4") << 16).view("<f4") if header[name]["dtype"] == "BF16" else values.copy() for name, values in arrays.items()}


def write_tensors(path, tensors):
    save_file({name: np.ascontiguousarray(values, np.float32) for name, values in tensors.items()}, path)


def stand_in(path, text):
    """Writes a shell script as a stand-in for a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/bash\n" + text)
    path.chmod(0o755)


def change_json(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def model_with(directory, model="qwen3", change=None, file="model.safetensors", **config):
    """A copy of a golden model with changed fields of config.json; change(tensors) changes the arrays of a file."""
    shutil.copytree(GOLDEN / model, directory)
    if config:
        change_json(directory / "config.json", **config)
    if change:
        tensors = read_tensors(directory / file)
        change(tensors)
        write_tensors(directory / file, tensors)
    return directory


def overflowing(*names):
    """A change for model_with: one product after another with these weights overflows; a single one that large is refused."""
    def change(tensors):
        for name in names:
            tensors[name] *= np.float32(1.7e19) / np.abs(tensors[name]).max()

    return change


# ---- faults -----------------------------------------------------------------------------------------------------------------------

def start_training(output, **options):
    return start(command("sft", output_dir=output, **{**SMALL, **options}))


def ends_with_one_message(process, *parts):
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1, error
    expect_one_message(error, *parts)


def preloaded(directory, source):
    """An environment that replaces functions of the C library by those of `source`."""
    if not shutil.which("g++"):
        pytest.skip("no g++")
    (directory / "shim.cpp").write_text(source)
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", directory / "shim.so", directory / "shim.cpp", "-ldl"], check=True)
    return {**ENVIRONMENT, "LD_PRELOAD": str(directory / "shim.so")}
