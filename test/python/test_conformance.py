"""The conformance cases (docs/conformance.md): both programs have none of their bugs, the wrong values are far from the right ones, and the script notices
a trainer that is wrong."""

import re
import sys

import conformance
import pytest
from runs import ROOT, call

SCRIPT = ROOT / "scripts" / "conformance.py"
CASES, TOLERANCE = conformance.read_suite()
BY_NAME = {case["name"]: case for case in CASES}


@pytest.mark.parametrize("name", BY_NAME)
def test_ours(name):
    assert conformance.try_case(conformance.load_adapter("ours"), BY_NAME[name], TOLERANCE) == ("right", "")


def test_each_bug_is_clear():
    """The reference with the bug gives another value, by at least ten tolerances."""
    assert len(CASES) == len(BY_NAME) >= 60
    for case in CASES:
        assert case["shown"], case["name"]
        for key in case["shown"]:
            assert conformance.far(case["right"][key], case["wrong"][key], TOLERANCE[key]) >= 10, (case["name"], key)
        assert case["threads"] and all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", thread) for thread in case["threads"]), case["name"]
        assert conformance.judge(case, case["wrong"], TOLERANCE) == ("BUG", case["bug"])


def test_the_cases_are_small():
    assert sum(path.stat().st_size for path in (ROOT / "test" / "conformance").rglob("*.*")) < 500_000


def script(*words):
    return call([sys.executable, str(SCRIPT), *map(str, words)])


def adapter(tmp_path, body):
    (tmp_path / "mine.py").write_text(body)
    return tmp_path / "mine.py"


def test_a_wrong_trainer_is_reported(tmp_path):
    """One of four cases has the bug, one another value, one fails, and one is not run."""
    mine = adapter(tmp_path, """
def run(case, folder):
    if case["task"] == "rm":
        raise NotImplementedError("no reward models")
    if case["name"] == "grpo_kl":
        raise ValueError("no such\\nfield")
    if case["name"] == "packed_state":
        return {"loss": 1.0}
    return {"loss": case["wrong"]["loss"]}
""")
    result = script("--trainer", mine, "--only", "accumulated_mean", "packed_state", "grpo_kl", "reward_position")
    assert result.returncode == 1 and result.stderr == ""
    for text in ("0 of 3 right, 1 BUG, 1 DIFFERS, 1 FAILS; 1 not run", "accumulated_mean: BUG: the loss is a mean of the micro-batches' means (huggingface/transformers#37766",
                 "packed_state: DIFFERS: loss 1, right is 5.6", "grpo_kl: FAILS: ValueError: field", "reward_position: not run: no reward models"):
        assert text in result.stdout, result.stdout


def test_a_value_that_hides_the_bug_is_no_answer(tmp_path):
    mine = adapter(tmp_path, "def run(case, folder):\n    return {'loss': case['right']['loss']}\n")
    result = script("--trainer", mine, "--only", "tied_gradient", "packed_state")
    assert result.returncode == 0 and "1 of 1 right; 1 not run" in result.stdout and "tied_gradient: not run: reports no grad_norm" in result.stdout


def test_not_a_number_is_not_right(tmp_path):
    mine = adapter(tmp_path, "def run(case, folder):\n    return {'loss': float('nan')}\n")
    assert "0 of 1 right, 1 DIFFERS" in script("--trainer", mine, "--only", "packed_state").stdout


@pytest.mark.parametrize("words, parts", [
    (["--trainer", "ours", "--only", "packed_stat"], ["--only packed_stat: there is no such case"]),
    (["--trainer", "nobody"], ["--trainer nobody: there is no", "one of deepspeed, ours, transformers, trl"]),
    (["--trainer", "EMPTY"], ["has no function run", "define run(case, folder)"]),
    (["--trainer", "BROKEN"], ["cannot be imported: SyntaxError"]),
    (["--trainer", "ours", "--cases", "CUT"], ["cut.json: JSONDecodeError"]),
    (["--trainer", "ours", "--cases", "none.json"], ["none.json: FileNotFoundError"]),
])
def test_wrong_calls(words, parts, tmp_path):
    files = {"EMPTY": ("empty.py", "x = 1\n"), "BROKEN": ("broken.py", "def run(:\n"), "CUT": ("cut.json", '{"cases": [')}
    for name, (file, text) in files.items():
        (tmp_path / file).write_text(text)
        words = [str(tmp_path / file) if word == name else word for word in words]
    result = script(*words)
    assert result.returncode == 1 and result.stderr.count("fix: ") == 1 and "Traceback" not in result.stderr
    assert all(part in result.stderr for part in parts), result.stderr
