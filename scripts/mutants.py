"""Tests the tests: every known bug of test/mutants.txt is switched on (llmc/core/mutant.h) and some test must fail.

    scripts/mutants.py [NUMBER...]     after `make test-mutants` has built the tests in build/mutants/test; from the repository root

Bugs in kernels (.cuh) are for test_cuda; where it was not built (no boost.context), they are left out.

Ends with "N passed, M failed", where a mutant that no test notices has failed.
"""

import os
import pathlib
import re
import subprocess
import sys

TESTS, CUDA_TESTS = "build/mutants/test/test_llmc", "build/mutants/test/test_cuda"
TABLE = "test/mutants.txt"


def read_table():
    mutants = []
    for line in open(TABLE):
        if line.strip() and not line.startswith("#"):
            number, bug, tests = (part.strip() for part in line.split("|"))
            mutants.append((int(number), bug, tests))
    return mutants


def numbers_in_sources():
    """Every MUTANT's number, and the binary that tests it."""
    files = [p for pattern in ("*/*.h", "*/*.cuh", "*/*.cpp") for p in pathlib.Path("llmc").glob(pattern)] + [*pathlib.Path(".").glob("*.cu")]
    return [(int(n), CUDA_TESTS if p.suffix == ".cuh" else TESTS)
            for p in files if p.name != "mutant.h" for n in re.findall(r"\bMUTANT\((\d+),", p.read_text())]


def run(binary, tests, number=0):
    """"green", "red", or "nothing": what the filtered tests say with this mutant switched on."""
    try:
        process = subprocess.run([binary, "--gtest_filter=" + tests, "--gtest_brief=1"],
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
    listed, found = sorted(number for number, _, _ in mutants), numbers_in_sources()
    if listed != sorted(number for number, _ in found):
        failures.append(f"{TABLE} lists {listed}, but the sources have MUTANT({sorted(number for number, _ in found)})")
    binaries = dict(found)
    chosen = [int(n) for n in sys.argv[1:]] or listed
    passed = 0
    right = {}  # what a filter says without a mutant
    for number, bug, tests in mutants:
        binary = binaries.get(number, TESTS)
        if number not in chosen or (binary == CUDA_TESTS and not os.path.exists(CUDA_TESTS)):
            continue
        key = binary, tests
        right[key] = right.get(key) or run(*key)
        said = run(*key, number) if right[key] == "green" else right[key] + " without it"
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
