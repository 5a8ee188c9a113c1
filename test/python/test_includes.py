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
