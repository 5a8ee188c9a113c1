"""Runs the fuzzers (test/fuzz) and ends with one line, "N passed, M failed".

    scripts/fuzz.py build/fuzz/config test/fuzz/chats.py [more] [--seconds 60]      from the repository root, as `make test-all` does

The C++ parsers have libFuzzer programs, which start with valid files and mutate them. The Python fuzzer generates records and templates. Two fuzzers
run at a time, always from the same seed, so a verdict is reproducible. If an input makes a parser crash, hang, or allocate more than 16 MiB at once
(inputs have at most 64 KiB), it is stored as build/fuzz/crash-..., and `build/fuzz/NAME FILE` repeats the failure; the Python fuzzer prints its own
command.
"""
import argparse
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

SEEDS = {
    "safetensors": ["test/golden/*/model.safetensors", "test/golden/pairs.safetensors"],
    "config": ["test/golden/*/config.json", "data/demo/model/config.json"],
    "index": ["test/fuzz/corpus/index/*"],
    "tokenizer": ["data/demo/model/tokenizer.json", "test/fuzz/corpus/tokenizer/*"],
    "prepared": ["test/golden/pairs.safetensors", "test/golden/*/golden.safetensors"],
    "checkpoint": ["test/fuzz/corpus/checkpoint/*"],
    "trainer_state": ["test/fuzz/corpus/trainer_state/*"],
}
LIMITS = ["-max_len=65536", "-malloc_limit_mb=16", "-rss_limit_mb=2048", "-timeout=10"]
LEAST_RUNS = {"": 10_000, ".py": 1000}


def make_corpus(name, folder):
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    for path in (path for pattern in SEEDS[name] for path in glob.glob(pattern)):
        with open(path, "rb") as file:
            data = file.read()
        with open(os.path.join(folder, hashlib.sha1(data).hexdigest()), "wb") as file:
            file.write(data)


def fuzz(program, seconds):
    """Returns true if the fuzzer found nothing, and a summary of its run."""
    name, kind = os.path.basename(program), os.path.splitext(program)[1]
    if kind == ".py":
        command = [sys.executable, program, f"--seconds={seconds}"]
    else:
        make_corpus(name, program + ".corpus")
        command = [program, program + ".corpus", f"-max_total_time={seconds}", f"-artifact_prefix={os.path.dirname(program)}/",
                   "-seed=1", "-print_final_stats=1", "-verbosity=1", *LIMITS]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    runs = re.search(r"stat::number_of_executed_units: (\d+)", result.stdout)
    count = int(runs[1]) if runs else 0
    if result.returncode == 0 and count >= LEAST_RUNS[kind]:
        return True, f"{name}: {count} runs"
    return False, f"{result.stdout[-6000:]}\nFAILED: {name} ended with code {result.returncode} after {count} runs (at least {LEAST_RUNS[kind]})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="+")
    parser.add_argument("--seconds", type=int, default=60)
    options = parser.parse_args()
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda program: fuzz(program, options.seconds), options.programs))
    for _, words in results:
        print(words)
    passed = sum(good for good, _ in results)
    print(f"{passed} passed, {len(results) - passed} failed")
    return passed < len(results)


if __name__ == "__main__":
    sys.exit(main())
