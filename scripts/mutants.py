"""Tests the tests: every known bug of test/mutants.txt is switched on (llmc/core/mutant.h) and some test must fail.

    scripts/mutants.py [NUMBER...]     after `make test-mutants` has built build/mutants/test/test_llmc; from the repository root

Ends with "N passed, M failed", where a mutant that no test notices has failed.
"""

import os
import pathlib
import re
import subprocess
import sys

BINARY = "build/mutants/test/test_llmc"
TABLE = "test/mutants.txt"


def read_table():
    mutants = []
    for line in open(TABLE):
        if line.strip() and not line.startswith("#"):
            number, bug, tests = (part.strip() for part in line.split("|"))
            mutants.append((int(number), bug, tests))
    return mutants


def numbers_in_sources():
    files = [*pathlib.Path("llmc").glob("*/*.h"), *pathlib.Path("llmc").glob("*/*.cpp"), *pathlib.Path(".").glob("*.cu")]
    return sorted(int(n) for p in files if p.name != "mutant.h" for n in re.findall(r"\bMUTANT\((\d+),", p.read_text()))


def run(tests, number=0):
    """"green", "red", or "nothing": what the filtered tests say with this mutant switched on."""
    try:
        process = subprocess.run([BINARY, "--gtest_filter=" + tests, "--gtest_brief=1"],
                                 env={**os.environ, "LLMC_MUTANT": str(number)}, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, text=True, errors="replace", timeout=300)
    except subprocess.TimeoutExpired:
        return "red"
    if process.returncode != 0:
        return "red"  # a failed test or a crash
    return "green" if re.search(r"\[  PASSED  \] [1-9]", process.stdout) else "nothing"


def main():
    mutants = read_table()
    failures = []
    listed = sorted(number for number, _, _ in mutants)
    if listed != numbers_in_sources():
        failures.append(f"{TABLE} lists {listed}, but the sources have MUTANT({numbers_in_sources()})")
    chosen = [int(n) for n in sys.argv[1:]] or listed
    passed = 0
    right = {}  # what a filter's tests say without a mutant
    for number, bug, tests in mutants:
        if number not in chosen:
            continue
        right[tests] = right.get(tests) or run(tests)
        said = run(tests, number) if right[tests] == "green" else right[tests] + " without it"
        print(f"  mutant {number:3d}  {'noticed' if said == 'red' else 'FAILED: ' + said}  {bug} ({tests})", flush=True)
        passed += said == "red"
        if said != "red":
            failures.append(bug)
    for failure in failures:
        print("FAILED: " + failure)
    print(f"{passed} passed, {len(failures)} failed")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
