"""Includes go one way: a folder of llmc may include itself and those before it, and nothing outside of llmc."""
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ORDER = ["core", "ops", "io", "data", "parallel", "model", "train", "app"]


def wrong_includes(root):
    wrong = []
    for path in sorted((root / "llmc").rglob("*")):
        if not path.is_file():
            continue
        folder = path.relative_to(root / "llmc").parts[0]
        for number, line in enumerate(path.read_text().splitlines(), 1):
            include = re.match(r'\s*#\s*include "(.*)"', line)
            if not include:
                continue
            target = (path.parent / include[1]).resolve()
            where = f"{path.relative_to(root)}:{number} includes {include[1]}"
            if root / "llmc" not in target.parents:
                wrong.append(f"{where}, which is not in llmc")
            elif ORDER.index(target.relative_to(root / "llmc").parts[0]) > ORDER.index(folder):
                wrong.append(f"{where}, but {folder} comes before that folder: {' <- '.join(ORDER)}")
    return wrong


def test_includes_go_one_way():
    assert not wrong_includes(ROOT)


def test_a_wrong_include_is_named(tmp_path):
    for name, text in {"core/a.h": '#include "../ops/b.h"\n', "ops/b.h": '#include "../../dev/c.h"\n#include "../core/a.h"\n'}.items():
        file = tmp_path / "llmc" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert [line.split(",")[0] for line in wrong_includes(tmp_path)] == ["llmc/core/a.h:1 includes ../ops/b.h", "llmc/ops/b.h:1 includes ../../dev/c.h"]
