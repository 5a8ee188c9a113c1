"""The Makefile and scripts: a missing dependency is named before anything starts, with the command that installs it; flags for the CPU and the GPUs."""

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from runs import ROOT, stand_in

BARE_PYTHON = [sys.executable, "-S"]  # without any package


def make(*words, cwd=ROOT, **environment):
    """Runs make. Returns exit code, standard output and standard error."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")}
    words = [shutil.which("make"), "--no-print-directory", "-j1", *map(str, words)]  # one job at a time keeps the order of lines
    result = subprocess.run(words, cwd=cwd, env=inherited | environment, capture_output=True, text=True, timeout=300)
    return result.returncode, result.stdout, result.stderr


@pytest.fixture(scope="module", autouse=True)
def probed():
    """Makes build/probe.mk, so that its table is not in the output under test."""
    make("build/flags")


@pytest.mark.parametrize("target, variable, what, fix", [
    ("test", "HAVE_GTEST=0", "GoogleTest", "make deps"),
    ("test-all", "CHECKS=race fuzzers", 'to know which checks: CHECKS="race fuzzers"',
     'CHECKS="races sanitizers mutants fuzzers ptx ptxas" or some of them'),
])
def test_a_missing_dependency_of_a_target(target, variable, what, fix):
    """The only message, before anything is built."""
    code, out, error = make(target, variable)
    assert code == 2 and out == "", out + error
    assert error.startswith(("Makefile:", "checks.mk:")) and error.count("***") == 1 and len(error.splitlines()) == 2, error
    assert f"*** make {target} needs {what}" in error and f"\n  fix: {fix}" in error, error


def test_missing_packages_without_root(tmp_path):
    """The script starts nothing that it cannot finish."""
    stubs, tree = tmp_path / "bin", tmp_path / "tree"
    (tree / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "install_deps.sh", tree / "scripts")
    for name, does in (("dpkg-query", "exit 1"), ("apt-get", "touch called"), ("id", "echo 1000")):
        stand_in(stubs / name, does)
    result = subprocess.run(["bash", tree / "scripts" / "install_deps.sh"], env={"PATH": f"{stubs}:{os.environ['PATH']}"}, capture_output=True,
                            text=True)
    assert result.returncode == 1 and "\n  fix: sudo apt-get update && sudo apt-get install" in result.stderr, result.stderr
    assert os.listdir(tree) == ["scripts"]


def test_omitted_tests_are_named_first_and_last(tmp_path):
    stand_in(tmp_path / "tests", "echo '[ RUN      ] A.B'; echo '[       OK ] A.B (0 ms)'\n")
    command = [*BARE_PYTHON, "scripts/run_tests.py", "--build", tmp_path, "--cpp", tmp_path / "tests", "--python", tmp_path, "--no_mpi"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    assert lines[1] == lines[-2] and re.match(r"left out: Python tests \(.+ has no .*, pytest: make deps\); ranks over MPI \(no MPI: make deps\)",
                                              lines[1]), lines


def test_costs_are_in_cpu_seconds(tmp_path):
    stand_in(tmp_path / "tests", "echo '[ RUN      ] Waits.A'; sleep 1; echo '[       OK ] Waits.A (1000 ms)'\n"
                                 "echo '[ RUN      ] Computes.B'; for ((i = 0; i < 50000; i++)); do :; done; echo '[       OK ] Computes.B (90 ms)'\n")
    words = [sys.executable, "scripts/run_tests.py", "--build", tmp_path, "--cuda", tmp_path / "tests"]
    lines = subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    largest = lines[lines.index(next(line for line in lines if line.startswith("==== the largest"))) + 1:]
    assert largest[0].endswith("Computes.B") and largest[-3].endswith(" 0.0 s  " + str(tmp_path / "tests") + " Waits.A"), lines
    recorded = (tmp_path / "cpu_seconds.txt").read_text().splitlines()
    assert len([line for line in recorded if "tests -Slow" in line]) == len(os.sched_getaffinity(0)) and largest[0] in recorded, recorded


@pytest.mark.parametrize("script, interpreter", [("scripts/smollm2.sh", "bash"), ("scripts/demo.py", sys.executable)])
def test_a_script_checks_its_packages_first(script, interpreter, tmp_path):
    for file in (script, "scripts/smollm2_data.sh", "data/prepare.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    stand_in(tmp_path / "train_llama", "echo started")
    stand_in(tmp_path / ".venv/bin/python3", f'exec {shlex.join(BARE_PYTHON)} "$@"\n')
    result = subprocess.run([interpreter, tmp_path / script], capture_output=True, text=True)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr == ("prepare.py: Python has no numpy, tokenizers, transformers, jinja2, xxhash\n"
                             "  fix: make deps (or: pip install -r requirements.txt)\n")


@pytest.mark.parametrize("unknown, cpu, flags", [
    ("-nothing", "native", ["-march=native", "-mprefer-vector-width=512"]),
    ("-march", "native", ["-mcpu=native", "-mprefer-vector-width=512"]),
    ("-m", "z80", ["-march=z80"]),  # the compiler reports an unknown name
])
def test_a_compiler_gets_only_flags_that_it_knows(unknown, cpu, flags, tmp_path):
    stand_in(tmp_path / "c++", f'case "$*" in *" {unknown}"*) exit 1 ;; esac\necho stand_in\n')
    (tmp_path / "probe.mk").write_text(f"PROBED_COMPILER := {tmp_path}/c++: stand_in\nHAVE_COMPILER := 1\n")
    made = tmp_path / "flags"
    code, _, errors = make(f"CXX={tmp_path}/c++", f"CPU={cpu}", f"BUILD={tmp_path}", f"PROBE={tmp_path}/probe.mk", made)
    assert (code, errors) == (0, "")
    assert [word for word in made.read_text().split() if word.startswith("-m")] == flags


def test_a_fortified_libc(tmp_path):
    """Ubuntu's compilers define _FORTIFY_SOURCE."""
    (tmp_path / "probe.mk").write_text("PROBED_COMPILER := $(COMPILER)\nHAVE_COMPILER := 1\n")
    code, _, errors = make("CXX=g++ -D_FORTIFY_SOURCE=2", f"BUILD={tmp_path}", f"PROBE={tmp_path}/probe.mk", tmp_path / "llmc/core.o")
    assert (code, errors) == (0, "")


# Names of headers that g++ 12's other headers include, but not those of later versions.
HEADERS = {
    "algorithm": r"std::(ranges::\w+|min|max|sort|find|find_if|any_of|all_of|fill|copy|clamp|reverse|transform)\(", "array": r"std::array<",
    "atomic": r"std::atomic", "chrono": r"std::chrono", "cmath": r"std::(sqrt|exp|log|pow|abs|floor|ceil|isfinite|isnan|tanh|expm1|log1p|round)\(",
    "cstdint": r"\bu?int(8|16|32|64)_t\b", "cstdlib": r"\b(getenv|setenv|malloc|free|exit|_Exit|abort|strto\w+)\(",
    "cstring": r"\b(mem(cpy|set|cmp)|strlen|strcmp|strcat|strchr|strstr|strerror)\(", "exception": r"std::(exception|current_exception|rethrow_exception)",
    "fstream": r"std::[io]?fstream", "functional": r"std::function<", "limits": r"std::numeric_limits", "memory": r"std::(unique|shared)_ptr",
    "mutex": r"std::(mutex|\w+_lock|lock_guard)", "optional": r"std::optional", "thread": r"std::(thread|this_thread)", "tuple": r"std::(tuple|tie)\b"}


def test_files_include_the_headers_of_their_names():
    """In the file itself or in a file of the project that it includes."""
    @functools.cache
    def included(file):
        text = file.read_text()
        found = set(re.findall("#include <(.+)>", text))
        return found.union(*(included((file.parent / name).resolve()) for name in re.findall('#include "(.+)"', text) if (file.parent / name).exists()))

    for file in (f for folder in ("llmc", "dev", "test") for end in ("h", "cpp", "cu", "cuh") for f in sorted((ROOT / folder).rglob(f"*.{end}"))):
        code = re.sub(r'//.*|"(\\.|[^"\n])*"', "", file.read_text())
        missing = [header for header, names in HEADERS.items() if re.search(names, code) and header not in included(file)]
        assert not missing, file


def test_programs_are_compiled_for_the_gpus_of_the_machine(tmp_path):
    """Each architecture that nvcc knows, once; without a GPU, for the CPU alone."""
    stand_in(tmp_path / "nvcc", "echo compute_80 compute_90")
    (tmp_path / "show.mk").write_text("show:\n\t@echo '$(GPU_ARCHS), $(ARCHS), $(CUDA)'\n")
    show = ["-s", "-f", "Makefile", "-f", tmp_path / "show.mk", f"NVCC={tmp_path}/nvcc", f"PROBE={tmp_path}/probe.mk", "show"]
    (tmp_path / "probe.mk").write_text("PROBED_COMPILER := $(COMPILER)\nHAVE_COMPILER := 1\nHAVE_CUDA := 1\n")
    for gpus, shown in (("9.0\\n8.0\\n9.0\\n12.1", "80 90, 80 90, 80 90"), ("", ", 80 90,"), ("NVIDIA-SMI has failed", ", 80 90,")):
        stand_in(tmp_path / "nvidia-smi", f"printf '{gpus}'")
        assert make(*show, PATH=f"{tmp_path}:{os.environ['PATH']}")[1].strip() == shown
    assert make(*show, "GPU_ARCHS=90", PATH=f"{tmp_path}:{os.environ['PATH']}")[1].strip() == "90, 90, 90"


def test_nccl_from_pip_is_found_if_the_system_has_none(tmp_path):
    stand_in(tmp_path / "bin/c++", 'case "$*" in *" -lnccl"*) exit 1 ;; esac\n')
    stand_in(tmp_path / "bin/python3", "echo /site/nvidia/nccl\n")
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CXX": "c++", "CXXFLAGS": "", "COMPILER": "c++: stand_in", "NVCC": ""}
    subprocess.run(["bash", ROOT / "scripts/probe.sh", tmp_path / "probe.mk"], cwd=tmp_path, env=environment, check=True, capture_output=True)
    probed = (tmp_path / "probe.mk").read_text()
    assert "HAVE_NCCL := 1\nNCCL_HEADERS := -isystem /site/nvidia/nccl/include\n" in probed, probed
    assert "NCCL_LIBRARIES := /site/nvidia/nccl/lib/libnccl.so.2 -Wl,-rpath,/site/nvidia/nccl/lib\n" in probed
