"""Runs the C++ and the Python tests and ends with one line, "N passed, M failed"; the exit code is the verdict.

    scripts/run_tests.py --build build          from the repository root, as `make test` does
    scripts/run_tests.py --build build --all    the slow ones, too (C++ suites Slow*, pytest's mark `slow`), mutants, fuzzers and format

A suite that crashes, does not start or runs nothing counts as a failure.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

SMALL_LAUNCHES = {"OMP_WAIT_POLICY": "passive"}  # many of them: OpenMP's threads should not spin in between


def googletest(binary, all_tests, environment={}):
    """Passed, failed. Shows what the tests print, but not the frame around every test."""
    command = [binary] + ([] if all_tests else ["--gtest_filter=-Slow*"])
    passed = failed = 0
    current = None
    try:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except OSError as error:
        print(f"FAILED: {binary} does not start: {error}")
        return 0, 1
    for line in process.stdout:
        if line.startswith("[ RUN      ]"):
            current = line[12:].strip()
        elif re.match(r"\[  (     OK|SKIPPED) \].* ms\)", line):
            passed, current = passed + ("OK" in line[:12]), None
        elif re.match(r"\[  FAILED  \].* ms\)", line):
            failed, current = failed + 1, None
            print(line, end="", flush=True)
        elif line.strip() and not line.startswith(("[", "Running main()", "Note: Google Test filter")):
            print(line, end="", flush=True)
    code = process.wait()
    if code != 0 and (current or failed == 0):
        print(f"FAILED: {binary} ended with code {code}" + (f" in {current}" if current else ""))
        failed += 1
    return passed, failed


def pytest(folder, build, all_tests):
    if not importlib.util.find_spec("pytest"):
        print("FAILED: no pytest for " + sys.executable + "\n  fix: make deps")
        return 0, 1
    report = os.path.join(build, "pytest.xml")
    if os.path.exists(report):
        os.remove(report)
    command = [sys.executable, "-m", "pytest", "-q", folder, "--junitxml", report, "-o", "markers=slow: left out of make test"]
    code = subprocess.run(command + ([] if all_tests else ["-m", "not slow"])).returncode
    if not os.path.exists(report):
        print(f"FAILED: pytest ended with code {code}")
        return 0, 1
    suite = ET.parse(report).getroot().find("testsuite")
    tests, failures, errors, skipped = (int(suite.get(k)) for k in ("tests", "failures", "errors", "skipped"))
    failed = failures + errors
    return tests - failed - skipped, failed + (code != 0 and failed == 0)


def counted(command, environment={}):
    """A program that ends with the same line as this one."""
    process = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    print(process.stdout, end="", flush=True)
    last = re.search(r"(\d+) passed, (\d+) failed\s*$", process.stdout)
    return (int(last[1]), int(last[2])) if last else (0, 1)


def ladders(programs):
    """The workshop's programs (dev/cuda) in the emulator."""
    results = [counted([program, "all", "--emu"], SMALL_LAUNCHES) for program in programs]
    return tuple(map(sum, zip(*results)))


def checked(command):
    """A program whose exit code says all: one test."""
    return (1, 0) if subprocess.run(command).returncode == 0 else (0, 1)


def of_build(binary):
    """What is special about the build that a binary belongs to."""
    return {"race": ", races", "san": ", sanitizers"}.get(binary.split("/")[1], "")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--cuda", nargs="*", default=[], help="the tests of CUDA kernels on the CPU, in one or several builds")
    parser.add_argument("--ptxas", nargs="*", default=[], help="with --all: what nvcc said of the kernels")
    parser.add_argument("--fuzzers", nargs="*", default=[], help="with --all")
    parser.add_argument("--ladders", nargs="*", default=[], help="programs of dev/cuda, in one or several builds")
    args = parser.parse_args()

    suites = {
        "C++": lambda: googletest(args.build + "/test/test_llmc", args.all),
        "Python": lambda: pytest("test/python", args.build, args.all),
    }
    for binary in args.cuda:
        suites["CUDA kernels" + of_build(binary)] = lambda binary=binary: googletest(binary, args.all, SMALL_LAUNCHES)
    for build in sorted({of_build(program) for program in args.ladders}):
        programs = [program for program in args.ladders if of_build(program) == build]
        suites["CUDA workshop" + build] = lambda programs=programs: ladders(programs)
    if args.all:
        suites["mutants"] = lambda: counted([sys.executable, "scripts/mutants.py"])
        if args.fuzzers:
            suites["fuzzers"] = lambda: counted([sys.executable, "scripts/fuzz.py", *args.fuzzers])
        if args.ptxas:
            suites["ptxas"] = lambda: counted([sys.executable, "scripts/ptxas.py", *args.ptxas])
        suites["format"] = lambda: checked(["make", "--no-print-directory", "format"])
    results = {}
    for name, run in suites.items():
        print(f"==== {name}", flush=True)
        passed, failed = run()
        if passed + failed == 0:
            print(f"FAILED: the {name} suite ran nothing")
            failed = 1
        results[name] = (passed, failed)
    print("====", ", ".join(f"{name} {p} of {p + f}" for name, (p, f) in results.items()))
    passed, failed = (sum(r[i] for r in results.values()) for i in (0, 1))
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
