#!/usr/bin/env python3
"""Runs the C++ and the Python tests and ends with one line, "N passed, M failed"; the exit code is the verdict.

    scripts/run_tests.py --build build --cpp build/test/test_llmc --python test/python     from the repository root, as `make test` does
    scripts/run_tests.py ... --all              also slow tests (C++ suites named Slow..., pytest's mark `slow`), mutants, fuzzers and format

A large suite is cut into one job per core. The number of concurrent programs is the number of cores plus one, because some tests wait. The output
ends with the 25 tests that cost most, the passed tests and the cost of each suite, the failed tests, and the last line. A cost is in CPU seconds, of
all threads and child processes, because these depend little on what else a machine does; build/cpu_seconds.txt has those of every job and test. A
program that crashes, does not start, or runs no test counts as a failure.
"""

import argparse
import glob
import importlib.util
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

CORES = len(os.sched_getaffinity(0))
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "passive"}  # a waiting thread must not block another job
SLOW = "Slow*:*/Slow*"
CHECKS = ["races", "sanitizers", "mutants", "fuzzers", "ptx", "ptxas"]
CLOCK_TICK = 1 / os.sysconf("SC_CLK_TCK")
AMX = "Attention*:Matmul*:Head*:Families*:Ring*:Ranks*:Amx*"  # tests of bf16 products


@dataclass
class Result:
    passed: int = 0
    failed: int = 0
    output: str = ""
    jobs: list = field(default_factory=list)  # (CPU seconds, name)
    tests: list = field(default_factory=list)  # (CPU seconds, name)
    failures: list = field(default_factory=list)  # names

    def __add__(self, other):
        return Result(self.passed + other.passed, self.failed + other.failed, self.output + other.output,
                      self.jobs + other.jobs, self.tests + other.tests, self.failures + other.failures)


def used_so_far(pid):
    """Returns the CPU seconds of a process and of its ended child processes."""
    with open(f"/proc/{pid}/stat") as file:
        return sum(map(int, file.read().rpartition(")")[2].split()[11:15])) * CLOCK_TICK


def run(command, environment={}):
    """Returns exit code, lines of output with the CPU seconds used until then, and all CPU seconds; 127 and a message if the program does not start."""
    try:
        process = subprocess.Popen(command, env=ENVIRONMENT | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    except OSError as error:
        return 127, [(f"FAILED: {command[0]} does not start: {error}\n", 0)], 0
    with process.stdout:
        lines = [(line, used_so_far(process.pid)) for line in process.stdout]
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, lines, usage.ru_utime + usage.ru_stime


def text_of(lines):
    return "".join(line for line, _ in lines)


def googletest(binary, tests, piece, environment):
    """Returns the tests' own output, without googletest's lines around every test."""
    number, count = map(int, piece.split("/"))
    shard = {"GTEST_SHARD_INDEX": str(number - 1), "GTEST_TOTAL_SHARDS": str(count)}
    code, lines, seconds = run([binary, f"--gtest_filter={tests}"], environment | shard)
    binary_name = binary.removeprefix("build/")
    result = Result(jobs=[(seconds, f"{binary_name} {tests} {piece}")])
    current = None
    for line, used in lines:
        end = re.match(r"\[  (     OK|FAILED |SKIPPED) \] (\S+).*\(\d+ ms\)", line)
        if line.startswith("[ RUN      ]"):
            current, before = line[12:].strip(), used
        elif end:
            result.passed += "OK" in end[1]
            result.failed += "FAILED" in end[1]
            result.tests.append((used - before, f"{binary_name} {end[2].rstrip(',')}"))
            if "FAILED" in end[1]:
                result.output += line
                result.failures.append(result.tests[-1][1])
            current = None
        elif line.strip() and not line.startswith(("[", "Running main()", "Note: ")):
            result.output += line
    if code != 0 and (current or result.failed == 0):
        result.failures.append(f"{binary} ended with code {code}" + (f" in {current}" if current else ""))
        result.output += f"FAILED: {result.failures[-1]}\n"
        result.failed += 1
    return result


def pytest(subject, files, build, all_tests):
    if not importlib.util.find_spec("pytest"):
        return Result(0, 1, f"FAILED: no pytest for {sys.executable}\n  fix: make deps\n", failures=[subject])
    report = os.path.join(build, subject + ".xml")
    if os.path.exists(report):
        os.remove(report)
    command = [sys.executable, "-m", "pytest", "-q", *files, "--junitxml", report, "-p", "no:cacheprovider"]
    # each plugin takes some time to load
    code, lines, seconds = run(command + ([] if all_tests else ["-m", "not slow"]), {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    jobs = [(seconds, subject)]
    if not os.path.exists(report):
        return Result(0, 1, f"{text_of(lines)}FAILED: pytest ended with code {code}\n", jobs, failures=[subject])
    suite = ET.parse(report).getroot().find("testsuite")
    tests, failures, errors, skipped = (int(suite.get(k)) for k in ("tests", "failures", "errors", "skipped"))
    failed = failures + errors
    failed += code not in (0, 5) and failed == 0  # 5: all of these files are slow
    costs, reasons = [], []
    for case in suite.iter("testcase"):
        name = f"{case.get('classname').rpartition('.')[2]}.py {case.get('name')}"
        costs += [(float(cost.get("value")), name) for cost in case.iterfind("properties/property[@name='cpu_s']")]  # of test/python/conftest.py
        reasons += [f"{name}: {reason.get('message', '').partition(chr(10))[0][:200]}" for reason in case if reason.tag in ("failure", "error")]
    return Result(tests - failures - errors - skipped, failed, text_of(lines), jobs, costs, reasons or [subject] * failed)


def counted(command):
    """A program with the same last line as this one."""
    _, lines, seconds = run(command)
    output = text_of(lines)
    last = re.search(r"(\d+) passed, (\d+) failed\s*$", output)
    passed, failed = (int(last[1]), int(last[2])) if last else (0, 1)
    name = " ".join(command).removeprefix(sys.executable).strip().removeprefix("build/")
    return Result(passed, failed, output, [(seconds, name)], [(seconds, name)], [f"{failed} of {name}"] if failed else [])


def checked(command):
    """A program that counts as one test; its exit code is the verdict."""
    code, lines, seconds = run(command)
    name = " ".join(command)
    return Result(int(code == 0), int(code != 0), text_of(lines), [(seconds, name)], failures=[name] if code else [])


def of_build(binary):
    """Returns the variant of a binary's build."""
    return {"race": ", races", "san": ", sanitizers"}.get(binary.split("/")[1], "")


def pieces(part):
    """Splits a part of the tests, "2/4" (every fourth, starting with the second), into one piece per core: "2/8" and "6/8"."""
    number, parts = map(int, part.split("/"))
    return [f"{number + parts * core}/{parts * CORES}" for core in range(CORES)]


def shards(binary, tests, part="1/1", **environment):
    return [(googletest, binary, tests, piece, environment) for piece in pieces(part)]


def unless_slow(binary, args):
    """Returns the jobs of all tests except the slow ones; with --all also of the given part of the slow ones."""
    return shards(binary, "-" + SLOW) + (shards(binary, SLOW, args.part) if args.all else [])


def suites(args):
    """Returns the jobs of each suite, as functions."""
    jobs = {}
    jobs["PTX"] = [(googletest, binary, args.ptx_tests, "1/1", {}) for binary in args.ptx]  # in one piece, because its last test summarises the coverage
    if args.cpp:  # before the first Python tests, which wait more than they compute
        jobs["C++"] = unless_slow(args.cpp, args)
    if args.python:
        subjects = {}  # test_prepare_*.py are one process, which loads transformers once
        size = {file: os.path.getsize(file) for file in glob.glob(args.python + "/test_*.py")}
        for file in sorted(size, key=lambda file: ("test_workshop" in file, size[file]), reverse=True):  # that one builds programs
            subjects.setdefault(re.match("test_[a-z0-9]+", os.path.basename(file))[0], []).append(file)
        jobs["Python"] = [(pytest, subject, files, args.build, args.all) for subject, files in subjects.items()]
    for binary in args.cuda:
        special = of_build(binary)
        jobs["CUDA kernels" + special] = shards(binary, "*", args.part) if special else unless_slow(binary, args)
    for program in args.ladders:
        jobs.setdefault("CUDA workshop" + of_build(program), []).append((counted, [program, "all", "--emu"]))
    for program in args.ptx_ladders:
        jobs.setdefault("PTX workshop", []).append((counted, [program]))
    if args.ptx_ladders:
        jobs["PTX counts"] = [(counted, [sys.executable, "scripts/gpu_counts.py", "--nvcc", args.nvcc, "--check", *args.ptx_ladders])]
    if args.mutants:
        jobs["AMX in software"] = shards(args.mutants[0], AMX, args.part, LLMC_AMX="1")
        jobs["mutants"] = [(counted, [sys.executable, "scripts/mutants.py", "--part", piece]) for piece in pieces(args.part)]
    if args.all:
        jobs["fuzzers"] = [(counted, [sys.executable, "scripts/fuzz.py", fuzzer]) for fuzzer in args.fuzzers]
        jobs["ptxas"] = [(counted, [sys.executable, "scripts/ptxas.py", *args.ptxas])] if args.ptxas else []
        jobs["format"] = [(checked, ["make", "--no-print-directory", "format"])]
    return {name: functions for name, functions in jobs.items() if functions}


def unavailable(args):
    """Returns the omitted tests, with reasons. If a package is missing, Python tests are omitted, but not with --all."""
    packages = re.findall(r"^(\w+)>=", open("requirements.txt").read(), re.M)
    missing = [package for package in packages if not importlib.util.find_spec(package)]
    left_out = []
    if missing and not args.all:
        args.python = None
        left_out.append(f"Python tests ({sys.executable} has no {', '.join(missing)}: make deps)")
    if args.no_mpi:
        left_out.append("ranks over MPI (no MPI: make deps)")
    if args.all and not args.nvcc:
        left_out.append("kernels as nvcc compiles them (no nvcc: the CUDA toolkit)")
    if args.all:
        left_out += [f"{check} (not in CHECKS)" for check in CHECKS if check not in args.checks]
    return left_out


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True, help="the folder for reports")
    parser.add_argument("--no_mpi", action="store_true", help="the programs were built without MPI")
    parser.add_argument("--cpp", nargs="?", help="the C++ tests")
    parser.add_argument("--python", nargs="?", help="the folder of the Python tests")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--part", default="1/1", help="with --all: 2/4 is every fourth test, from the second on, of the suites that take longest")
    parser.add_argument("--cuda", nargs="*", default=[], help="the tests of CUDA kernels on the CPU, in one or several builds")
    parser.add_argument("--ptxas", nargs="*", default=[], help="with --all: nvcc's messages about the kernels")
    parser.add_argument("--fuzzers", nargs="*", default=[], help="with --all")
    parser.add_argument("--mutants", nargs="*", default=[], help="the C++ tests, and those of CUDA kernels, built with switchable known bugs")
    parser.add_argument("--ladders", nargs="*", default=[], help="programs of dev/cuda, in one or several builds")
    parser.add_argument("--ptx", nargs="*", default=[], help="the PTX interpreter's tests, and those of kernels that it runs")
    parser.add_argument("--ptx_tests", default="*", help="only these of its tests")
    parser.add_argument("--ptx_ladders", nargs="*", default=[], help="programs of dev/cuda that interpret their PTX")
    parser.add_argument("--nvcc", help="the nvcc that compiled them")
    parser.add_argument("--checks", nargs="*", default=[], help=f"with --all: which of {' '.join(CHECKS)}")
    args = parser.parse_args()

    note = "" if args.part == "1/1" else f"part {args.part} alone of slow tests in C++ and PTX, races, sanitizers, CUDA workshop, AMX, mutants, fuzzers and ptxas"
    print("====", note or "all suites" if args.all else "all but the slow tests", flush=True)
    left_out = unavailable(args)
    if left_out:
        print(f"left out: {'; '.join(left_out)}", flush=True)
    results = {}
    with ThreadPoolExecutor(CORES + 1) as pool:
        running = {name: [pool.submit(*job) for job in jobs] for name, jobs in suites(args).items()}
        for name, jobs in running.items():
            print(f"==== {name}", flush=True)
            results[name] = Result()
            for job in jobs:
                print(job.result().output, end="", flush=True)
                results[name] += job.result()
            if results[name].passed + results[name].failed == 0:
                print(f"FAILED: the {name} suite ran nothing")
                results[name] += Result(failed=1, failures=[f"the {name} suite ran nothing"])
    total = sum(results.values(), Result())
    jobs, tests = ([f"{seconds:7.1f} s  {name}\n" for seconds, name in sorted(costs, reverse=True)] for costs in (total.jobs, total.tests))
    with open(os.path.join(args.build, "cpu_seconds.txt"), "w") as file:
        file.writelines(jobs + ["\n"] + tests)
    print(f"==== the largest in CPU seconds, of {sum(seconds for seconds, _ in total.jobs):.0f}\n" + "".join(tests[:25]), end="")
    print("====", ", ".join(f"{name} {r.passed} of {r.passed + r.failed} in {sum(seconds for seconds, _ in r.jobs):.0f} s" for name, r in results.items())
          + (f" ({note})" if note else ""))
    if not results:
        print("FAILED: there was no suite to run")
        total.failed = 1
    if left_out:
        print(f"left out: {'; '.join(left_out)}")
    for name in total.failures:
        print(f"failed: {name}")
    print(f"{total.passed} passed, {total.failed} failed")
    return total.failed > 0


if __name__ == "__main__":
    sys.exit(main())
