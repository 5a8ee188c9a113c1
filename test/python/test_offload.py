"""Runs that offload activations, moments and weights to a disk. test_same_bits.py compares their bits for every task; test_store.cpp has the faults of
a disk."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from runs import GOLDEN, SMALL, call, change_json, command, log_lines, preloaded, refused, same_run, train, weights

ALL = "activations,optimizer,weights"


@pytest.fixture
def place(tmp_path):
    path = tmp_path / "place"
    path.mkdir()
    yield path
    assert list(path.iterdir()) == []  # also after an error


def test_checkpoints_do_not_depend_on_offloading(data, place, tmp_path):
    """A run with offloading resumes from a checkpoint of a run without, and the other way round."""
    options = {"data": data, "max_steps": 9, "moments": "8bit", "save_steps": 3}
    offload = {"offload": ALL, "offload_dir": place}
    train(tmp_path / "straight", **options)
    train(tmp_path / "run", **options, **offload)
    same_run(tmp_path / "run", tmp_path / "straight")
    assert log_lines(tmp_path / "run")[0]["offloaded_bytes"] > 0 == log_lines(tmp_path / "straight")[0]["offloaded_bytes"]
    for name, source, more in (("in", "run", {}), ("out", "straight", offload)):
        train(tmp_path / name, resume=tmp_path / source / "step_3", **options, **more)
        assert weights(tmp_path / name) == weights(tmp_path / "straight")


HANGS = """
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int store = -1;  // the file without a name
static bool hangs(const char *call) { return getenv("HANGS") && !strcmp(getenv("HANGS"), call); }

extern "C" int open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    const int mode = va_arg(more, int);
    va_end(more);
    const bool unnamed = (flags & O_TMPFILE) == O_TMPFILE;
    if (unnamed && hangs("open")) pause();
    const int file = ((int (*)(const char *, int, int))dlsym(RTLD_NEXT, "open"))(path, flags, mode);
    if (unnamed) store = file;
    return file;
}

extern "C" ssize_t pread(int file, void *to, size_t bytes, off_t at) {
    if (file == store && hangs("read")) pause();
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
    """limit(bytes) makes a control group with this much memory, and returns the file that takes the id of a process."""
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
        pytest.skip("this machine allows no control group with a memory limit")

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


@pytest.mark.slow
def test_a_model_of_one_and_a_half_times_the_memory(data, memory, place, tmp_path):
    """The size counts parameters, gradients and moments. The gradients, three eighths of the memory, stay there."""
    model = tmp_path / "trained"  # the run under test reads its weights from a file
    options = {"data": data, "max_steps": 3, "dtype": "f32", **SMALL}
    train(model, model=large_model(tmp_path / "model"), **options | {"max_steps": 1})
    train(tmp_path / "straight", model=model, **options)
    procs = memory(int(16 * log_lines(model)[0]["model"]["parameters"] / 1.5))

    def limited(output, **offload):
        return call(command("sft", output_dir=output, model=model, **options, **offload), timeout=300,
                    preexec_fn=lambda: procs.write_text(str(os.getpid())))

    assert limited(tmp_path / "killed").returncode == -signal.SIGKILL
    result = limited(tmp_path / "run", offload=ALL, offload_dir=place)
    assert result.returncode == 0, result.stdout + result.stderr
    same_run(tmp_path / "run", tmp_path / "straight")
