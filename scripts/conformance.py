#!/usr/bin/env python3
"""Runs the conformance cases of test/conformance on a trainer, and prints a table.

    scripts/conformance.py --trainer ours
    .venv-compare/bin/python scripts/conformance.py --trainer ours transformers trl
    scripts/conformance.py --trainer FILE.py [--only NAME ...]

Each case is a step of training with the right loss, gradient norm and log-probabilities in float64, and the values that a known bug gives. A trainer is
called through an adapter: a file with a function run(case, folder), as docs/conformance.md describes. The exit code is 0 if no case is wrong.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "data"))
from program import run  # noqa: E402

SUITE = ROOT / "test" / "conformance"
ADAPTERS = Path(__file__).resolve().parent / "conformance"
MODELS = "model", "ref_model", "teacher_model", "critic_model", "adapter", "tokenizer"


def fail(what, fix):
    sys.exit(f"scripts/conformance.py: {what}\n  fix: {fix}")


# ---- cases and adapters ----

def read_suite(path=SUITE / "cases.json"):
    """Returns the cases with their records and the directories of their models, and the tolerances."""
    try:
        suite = json.loads(path.read_text())
        for case in suite["cases"]:
            case["records"] = suite["records"][case["records"]]
            for name in MODELS:
                if name in case:
                    own = SUITE / case[name]
                    case[name] = str(own if own.exists() else ROOT / "test" / "golden" / case[name])
        return suite["cases"], suite["tolerance"]
    except (OSError, ValueError, KeyError) as error:
        fail(f"{path}: {type(error).__name__}: {error}", "git checkout the file, or run test/conformance/make.py")


def load_adapter(name):
    path = Path(name) if name.endswith(".py") else ADAPTERS / f"{name}.py"
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in ADAPTERS.glob("*.py")))
        fail(f"--trainer {name}: there is no {path}", f"one of {known}, or a file FILE.py with a function run(case, folder)")
    spec = importlib.util.spec_from_file_location(f"adapter_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        fail(f"--trainer {name}: {path} cannot be imported: {type(error).__name__}: {error}", "the Python that has the packages of this trainer")
    if not callable(getattr(module, "run", None)):
        fail(f"--trainer {name}: {path} has no function run", "define run(case, folder), which returns loss and grad_norm")
    return module.run


# ---- one case ----

def far(a, b, relative):
    """The largest difference of two numbers or lists of numbers, in tolerances."""
    a, b = (value if isinstance(value, list) else [value] for value in (a, b))
    if len(a) != len(b):
        return float("inf")
    differences = [abs(x - y) / (relative * max(abs(x), abs(y), 0.01)) for x, y in zip(a, b)]
    return max(float("inf") if d != d else d for d in differences)


def judge(case, got, tolerance):
    """Returns a word, and what to know about it."""
    keys = [key for key in case["right"] if got.get(key) is not None]
    if not set(keys) & set(case["shown"]):
        return "-", "reports no " + " or ".join(case["shown"])
    wrong = [key for key in keys if not far(got[key], case["right"][key], tolerance[key]) <= 1]
    if not wrong:
        return "right", ""
    if all(far(got[key], case["wrong"][key], tolerance[key]) <= 1 for key in keys):
        return "BUG", case["bug"]
    return "DIFFERS", "; ".join(f"{key} {shown(got[key])}, right is {shown(case['right'][key])}" for key in wrong)


def shown(value):
    return "[" + " ".join(f"{x:.6g}" for x in value) + "]" if isinstance(value, list) else f"{value:.7g}"


def try_case(adapter, case, tolerance):
    with tempfile.TemporaryDirectory() as folder:
        try:
            got = adapter(json.loads(json.dumps(case)), Path(folder))
            return judge(case, got, tolerance)
        except NotImplementedError as error:
            return "-", str(error)
        except Exception as error:
            return "FAILS", f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"[:300]


def print_table(names, rows):
    width = max(len(case["name"]) for case, _ in rows)
    print(f"{'case':{width}}  " + "  ".join(f"{name:12}" for name in names))
    for case, verdicts in rows:
        print(f"{case['name']:{width}}  " + "  ".join(f"{word:12}" for word, _ in verdicts).rstrip())
    for number, name in enumerate(names):
        words = [verdicts[number][0] for _, verdicts in rows]
        counts = ", ".join(f"{words.count(word)} {word}" for word in ("BUG", "DIFFERS", "FAILS") if word in words)
        print(f"\n{name}: {words.count('right')} of {len(words) - words.count('-')} right" + (f", {counts}" if counts else "")
              + (f"; {words.count('-')} not run" if "-" in words else ""))
        for case, verdicts in rows:
            word, text = verdicts[number]
            if word != "right":
                print(f"  {case['name']}: {word if word != '-' else 'not run'}: {text}" + (f" ({' '.join(case['threads'])})" if word == "BUG" else ""))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", nargs="+", required=True, metavar="NAME", help="ours, transformers, trl, deepspeed or FILE.py")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="these cases alone")
    parser.add_argument("--cases", type=Path, default=SUITE / "cases.json", metavar="FILE.json", help="another list of cases")
    options = parser.parse_args()
    cases, tolerance = read_suite(options.cases)
    unknown = set(options.only or []) - {case["name"] for case in cases}
    if unknown:
        fail(f"--only {sorted(unknown)[0]}: there is no such case", "a name of the table that is printed without --only")
    cases = [case for case in cases if not options.only or case["name"] in options.only]
    adapters = [load_adapter(name) for name in options.trainer]
    rows = [(case, [try_case(adapter, case, tolerance) for adapter in adapters]) for case in cases]
    print_table([Path(name).stem for name in options.trainer], rows)
    return int(any(word in ("BUG", "DIFFERS", "FAILS") for _, verdicts in rows for word, _ in verdicts))


if __name__ == "__main__":
    run(main)
