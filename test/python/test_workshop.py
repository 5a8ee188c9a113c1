"""The workshop's tools: new_version.py copies a version of every ladder, each version has an idea, and each exercise has a solution."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from runs import ROOT  # adds scripts/ to sys.path
import exercise
import ladder_counts
import new_version

LADDERS = sorted(path.stem for path in (ROOT / "dev/cuda").glob("*.cu") if path.stem != "timing")
CALLED_BY_RUN = {"attention_forward", "attention_backward"}  # the table lacks the last version


@pytest.fixture
def tree(tmp_path):
    shutil.copytree(ROOT / "dev/cuda", tmp_path / "dev/cuda")
    os.symlink(ROOT / "llmc", tmp_path / "llmc")
    return tmp_path


def new(tree, *args):
    done = subprocess.run([sys.executable, ROOT / "scripts/new_version.py", *args, "--root", tree], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def test_every_ladder_has_an_exercise():
    assert exercise.names() == LADDERS


def test_every_version_has_an_idea():
    for name in LADDERS:
        assert len(ladder_counts.ideas(name)) == len(new_version.Ladder(ROOT, name).launchers) + (name in CALLED_BY_RUN), name


@pytest.mark.parametrize("name", LADDERS)
def test_a_new_version_is_a_copy(tree, name):
    before = new_version.Ladder(tree, name)
    code, text = new(tree, name)
    assert code == 0, text
    after = new_version.Ladder(tree, name)
    assert len(after.launchers) == len(before.launchers) + 1 and f"version {len(after.launchers)} is a copy" in text
    copied, source = after.copied(len(after.launchers)), before.copied(int(re.search(r"copy of version (\d+)", text)[1]))
    assert len(copied) == len(source) and any("__global__" in body for _, body in copied) == (name != "ring_exchange")
    assert not {name for name, _ in copied} & {name for name, _ in source}  # the copy has new names
    assert after.source.count("\"a copy of version") == 1


def test_versions_that_cannot_be_copied(tree):
    assert new(tree, "rope", "--from", "9") == (1, "version 9 of rope has no kernel in dev/cuda/rope.cu or in the file of llmc/ops "
                                                   "that its heading names\n  fix: give --from one of 1, 2, 3, 4\n")
    code, text = new(tree, "nope")
    assert code == 1 and text.startswith("there is no ladder nope\n  fix: use one of adamw ")


@pytest.mark.slow
@pytest.mark.parametrize("name", exercise.names())
def test_an_exercise_fails_before_its_solution_and_passes_with_it(tmp_path, name):
    if not (ROOT / "build/llmc/core.o").exists():
        pytest.skip("nothing is built")
    if ladder_counts.for_hopper(name) and not (ROOT / ladder_counts.INTERPRETER / name).exists():
        pytest.skip("no program for the PTX interpreter is built")
    exercise.copy_of_sources(tmp_path / "tree")
    task = exercise.Exercise(name)
    task.begin(tmp_path / "tree")
    wrong = task.check(tmp_path / "tree")
    if task.says:
        assert len(wrong) == 1 and task.says in wrong[0], wrong
    else:
        assert len(wrong) == len(task.bounds) and all(re.fullmatch(r"[a-z ]+: \d+, and at most \d+ are allowed", line) for line in wrong), wrong
    task.solve(tmp_path / "tree")
    assert task.check(tmp_path / "tree") == []


@pytest.mark.parametrize("name", exercise.names())
def test_a_solution_fits_its_start(tree, name):
    task = exercise.Exercise(name)
    assert task.bounds and bool(task.says) == bool(task.to_start) and task.begin(tree) == len(new_version.Ladder(tree, name).launchers)
    task.solve(tree)
