"""docs/book is up to date: its commands print the shown lines, its code is in the sources, its derivations name tests and mutants, and its programs draw
its pictures. A third of the commands that build something run for each commit; BOOK=all runs all.
"""

import os
import re
import subprocess
import sys

import pytest
from runs import ROOT  # adds scripts/ to sys.path
import mutants

BOOK = ROOT / "docs/book"
CHAPTERS = sorted(page for page in BOOK.glob("*.md") if page.name not in ("README.md", "questions.md"))
TESTS = "".join(path.read_text() for path in (ROOT / "test").rglob("*.cpp"))


def commands(page):
    """(command, the lines that it prints) of each indented block whose first line begins with "$ "."""
    for block in re.findall(r"(?:^    .*\n|^\n(?=    (?!\$)))+", page.read_text(), re.M):
        for part in re.split(r"^    \$ ", block, flags=re.M)[1:]:
            command, _, printed = part.partition("\n")
            yield command, [line[4:].rstrip() for line in printed.rstrip().splitlines()]


def masked(line):
    """The line without times, which differ from run to run."""
    return re.sub(r"\d+(\.\d+)? (ms|s|seconds)\b", "TIME", line).rstrip()


def matches(shown, printed):
    """True if all shown lines are in the output in this order; a shown line "..." matches any number of lines."""
    if not shown or shown == ["..."]:
        return True
    if shown[0] == "...":
        return any(matches(shown[1:], printed[n:]) for n in range(len(printed) + 1))
    return bool(printed) and masked(shown[0]) == masked(printed[0]) and matches(shown[1:], printed[1:])


ALL = [(page, command, shown) for page in CHAPTERS for command, shown in commands(page)]
BUILDS = [entry for entry in ALL if re.match(r"make|build/|\./train", entry[1])]
QUICK = [entry for entry in ALL if entry not in BUILDS and "mutants.py" not in entry[1]]
TURN = int(subprocess.run("git rev-list --count HEAD", shell=True, cwd=ROOT, capture_output=True, text=True).stdout or 0)


def run(command):
    environment = {**os.environ, "MAKEFLAGS": "", "NVCC": ""}
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    return done.returncode, [line.rstrip() for line in done.stdout.splitlines() if not re.match(r"compile |link |flags ", line)]


def expect_output(command, shown):
    code, printed = run(command)
    assert code == 0 and matches(shown, printed), "\n".join(printed)


@pytest.mark.parametrize("page,command,shown", QUICK, ids=lambda x: getattr(x, "stem", None))
def test_a_program_prints_what_its_chapter_shows(page, command, shown):
    assert shown, f"{page}: {command} shows nothing"
    expect_output(command, shown)


@pytest.mark.slow
@pytest.mark.parametrize("page,command,shown", BUILDS, ids=lambda x: getattr(x, "stem", None))
def test_a_build_prints_what_its_chapter_shows(page, command, shown):
    if os.environ.get("BOOK") != "all" and BUILDS.index((page, command, shown)) % 3 != TURN % 3:
        pytest.skip("another commit's turn")
    expect_output(command, ["...", *shown])  # make may print lines about the machine first


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.stem)
def test_tests_mutants_and_code_of_a_chapter_exist(page):
    known, text = {mutant.number: mutant for mutant in mutants.read_table(ROOT / "test/mutants.txt")}, page.read_text()
    for line in re.findall(r"^Held by: (.*)$", text, re.M):
        (suite, name), = re.findall(r"`(\w+)\.(\w+)`", line)
        assert re.search(rf"TEST(_P|_F)?\({suite}, {name}\)", TESTS), line
        assert int(re.search(r"mutant (\d+)\.$", line)[1]) in known, line
    for path, code in re.findall(r"<!-- code: (\S+) -->\n```\w+\n(.*?)```", text, re.S):
        assert " ".join(code.split()) in " ".join((ROOT / path).read_text().split()), f"{path} no longer has:\n{code}"
    for command, shown in commands(page):
        if "mutants.py --install" in command:
            mutant = known[int(command.split()[-1])]
            test = mutant.binary.replace("build/mutants/", "build/")
            assert shown == [f"{mutant.file} has mutant {mutant.number}: {mutant.bug}",
                             f"to detect it: make {test} && {test} --gtest_filter='{mutant.tests}'",
                             f"to remove it: scripts/mutants.py --remove {mutant.number}"]


def test_a_mutant_is_installed_and_removed(tmp_path):
    (tmp_path / "test").mkdir()
    (tmp_path / "test/mutants.txt").write_text("7 | some.h | Some* | some bug\n- a + b\n+ a - b\n")
    (tmp_path / "some.h").write_text("int sum(int a, int b) { return a +\n  b; }\n")

    def call(flag):
        done = subprocess.run([sys.executable, ROOT / "scripts/mutants.py", flag, "7"], cwd=tmp_path, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True)
        return done.returncode, done.stdout, (tmp_path / "some.h").read_text()

    code, text, source = call("--install")
    assert code == 0 and "some.h has mutant 7: some bug" in text and "return a - b;" in source
    assert call("--install")[0] == 1
    assert call("--remove") == (0, "some.h is restored\n", "int sum(int a, int b) { return a + b; }\n")


@pytest.mark.slow
def test_pictures_are_drawn_by_the_programs(tmp_path):
    """Also the pictures of other pages, except curves of measured runs and those that need many plans. Two need ladders that nvcc has compiled."""
    names = {f"book_{path.stem}" for path in BOOK.glob("*.png")} | {path.stem for path in (ROOT / "docs").glob("*.png")}
    names -= {"demo_loss", "grad_dtype", "longest_sample", "timeline"}
    names -= {ladder for ladder in ("attention_hopper", "hopper_matmul") if not (ROOT / "build/ptx/dev/cuda" / ladder).exists()}
    drawn = subprocess.run([sys.executable, ROOT / "scripts/figures.py", tmp_path, *names], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert len(drawn.splitlines()) == len(names) == len(list(tmp_path.rglob("*.png")))
