"""Fixtures for several files."""

import resource
import shutil
import signal
import subprocess

import numpy as np
import pytest
from runs import ENVIRONMENT, random_documents, write_data

# `make test &` and `nohup make test` ignore these signals, and programs under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def cpu_seconds():
    """Of this process and of its ended child processes."""
    return sum(sum(resource.getrusage(whose)[:2]) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    item.began = cpu_seconds()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    """Adds what a test cost to the report for scripts/run_tests.py."""
    if call.when == "teardown":
        item.user_properties.append(("cpu_s", cpu_seconds() - item.began))


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "data.safetensors", random_documents(23))


@pytest.fixture(scope="session")
def prompts(tmp_path_factory):
    """Prompts with the same right answer: one token."""
    random, documents = np.random.default_rng(3), []
    for _ in range(12):
        prompt = random.integers(4, 90, random.integers(1, 12))
        documents.append((np.append(prompt, [7]), np.append(0 * prompt, [1])))
    return write_data(tmp_path_factory.mktemp("prompts") / "prompts.safetensors", documents)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """An empty cache of prepared data and references for one test."""
    monkeypatch.setitem(ENVIRONMENT, "XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "train_llama"


@pytest.fixture
def bench(tmp_path, capsys):
    from preparing import Bench  # loads transformers, which takes seconds

    return Bench(tmp_path, capsys)


@pytest.fixture
def disk(tmp_path):
    """A file system of 4 MiB, and mount(options) to change it."""
    path = tmp_path / "disk"
    path.mkdir()

    def mount(options):
        return subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)], capture_output=True).returncode == 0

    if not shutil.which("mount") or not mount("size=4m"):
        pytest.skip("this machine does not allow to mount a file system")
    yield path, mount
    subprocess.run(["umount", "-l", str(path)], check=True)
