"""scripts/mutants.py: known bugs in a copy of the sources, and its message on a bug that no longer fits."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import mutants  # noqa: E402

SOURCE = "void f(int *x) {\n    for (int i = 0; i < 3; i++)\n        x[i] = i + 1;\n    if (*x) return;\n    f(x);  // again\n    g();\n}\n"


def table(path, *entries):
    path.write_text("# number | file | tests | bug\n\n" + "\n\n".join(entries) + "\n")
    return mutants.read_table(path)


def entry(right, wrong, head="7 | f.h | F* | one too many"):
    return "\n".join([head, *("- " + line for line in right.split("\n")), *("+ " + line for line in wrong.split("\n"))])


def mutated(tmp_path, *texts):
    entries = [entry(*text, f"{number} | f.h | F* | a bug") for number, text in enumerate(texts, 7)]
    return mutants.mutated("f.h", SOURCE, table(tmp_path / "mutants.txt", *entries))


def refused(call, *parts):
    with pytest.raises(SystemExit) as error:
        call()
    for part in (*parts, "\n  fix: "):
        assert part in str(error.value), (part, error.value)


def test_the_tree_holds_every_mutant_and_is_left_alone_when_nothing_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    tree = tmp_path / "tree"
    mutants.make_tree(tree)
    sources = "".join(path.read_text() for path in tree.rglob("*") if path.is_file())
    for mutant in mutants.read_table():
        assert mutant.number == 0 or sources.count(f"mutant({mutant.number})") == 1, mutant
    before = {path: path.stat().st_mtime_ns for path in tree.rglob("*") if path.is_file()}
    (tree / "llmc/ops/gone.h").write_text("")
    mutants.make_tree(tree)
    assert {path: path.stat().st_mtime_ns for path in tree.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("right, wrong, expected", [
    ("i + 1", "i", "x[i] = (mutant(7) ? (i) : (i + 1));"),
    ("x[i]  =\ni + 1;", "x[i] = 0;", "{ if (mutant(7)) {\nx[i] = 0;\n} else {\nx[i] = i + 1;\n} }"),
    ("f(x);  // again", ";", "{ if (mutant(7)) {\n;\n} else {\nf(x);  // again\n} }"),
    ("if (*x) return;", "if (x[1]) return;\nif (*x) return;", "if (mutant(7)) { if (x[1]) return; }\nif (*x) return;"),
])
def test_expressions_statements_and_what_stands_in_front_of_them(tmp_path, right, wrong, expected):
    assert expected in mutated(tmp_path, (right, wrong))


def test_a_text_that_no_longer_fits_is_named(tmp_path):
    refused(lambda: mutated(tmp_path, ("i + 2", "i")), "mutant 7 ", "f.h has this text 0 times", "i + 2")
    refused(lambda: mutated(tmp_path, ("i", "j")), "mutant 7 ", "f.h has this text ")
    refused(lambda: mutated(tmp_path, ("i + 1", "i"), ("x[i] = i + 1;", ";")), "mutants 8 and 7 ", "f.h")
