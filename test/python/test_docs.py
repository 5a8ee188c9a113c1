"""The links, file names and flags in the pages are valid. Rules for sources: the order of includes between the folders of llmc, and the clock for
durations."""

import re
import textwrap
from pathlib import Path

from runs import DEMO, chat, write_lines

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in ("data", "dev", "docs", "llmc", "scripts",
                                                          "test") for page in (ROOT / folder).rglob("*.md"))])
DOCS = [page for page in PAGES if page.parent == ROOT / "docs"]
MADE = re.compile(r"(.*\.plain|.*_emu|.*\.ptxas|build/.*|out/.*)")  # written by `make` and runs


def without_code(text):
    """Removes indented and fenced blocks, and brackets in inline code: they have no links and no headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", lambda code: re.sub(r"[\[\]()#]", "", code[0]), re.sub(r"^    .*$", "", text, flags=re.M))


def anchors(page):
    """The anchors of the headings by GitHub's rules: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ +(.*)$", without_code(page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links(page):
    """(target file, anchor or "") of each link within the repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text()))
    parts = [target.partition("#") for target in targets if not re.match(r"[a-z]+:", target)]
    return [((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in parts]


def test_every_link_has_a_target():
    assert sum(len(links(page)) for page in PAGES) > 50
    assert [(page, path, anchor) for page in PAGES for path, anchor in links(page)
            if not path.exists() or (anchor and anchor not in anchors(path))] == []


def test_every_page_is_reachable_from_the_readme():
    seen, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in seen:
            seen.add(page)
            ahead += [path for path, _ in links(page) if path.suffix == ".md"]
    assert [page for page in PAGES if page not in seen] == []


def test_files_named_in_pages_exist():
    names = [(page, name) for page in PAGES for name in re.findall(r"`((?:llmc|data|scripts|test|dev|docs)/[\w./-]+)`", page.read_text())]
    assert [(page, name) for page, name in names if not MADE.fullmatch(name) and "NAME" not in name and not (ROOT / name).exists()] == []


def test_the_cells_of_the_page_on_notebooks(tmp_path, monkeypatch):
    """They run in order; the last one needs PyTorch."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_llama").symlink_to(ROOT / "train_llama")
    write_lines(tmp_path / "chats.jsonl", [{"messages": chat("reverse tamilo", "olimat!")}])
    cells = re.findall(r"(?:^    .*\n|\n(?=    ))+", (ROOT / "docs/notebooks.md").read_text(), re.M)
    names = {}
    for cell in cells[:-1]:
        exec(textwrap.dedent(cell).replace("MODEL", str(DEMO)), names)
    assert len(cells) == 4 and names["steps"][0]["loss"] > 0 and names["weights"]["model.norm.weight"].size


def test_every_flag_is_in_the_manual():
    flags = re.findall(r"^OPT\([\w:<>]+, (\w+),", (ROOT / "llmc/train/options.def").read_text(), re.M)
    assert len(flags) > 50
    manual = "".join(page.read_text() for page in DOCS if page.name not in ("porting.md", "benchmarks.md"))
    assert [flag for flag in flags if not re.search(rf"(`|--){flag}\b", manual)] == []


ORDER = ["core", "ops", "io", "data", "parallel", "model", "train", "app"]


def test_the_order_of_includes():
    """A folder of llmc includes only itself and earlier folders, and nothing outside llmc."""
    llmc, wrong = ROOT / "llmc", []
    for path in (path for path in llmc.rglob("*") if path.is_file()):
        for include in re.findall(r'^\s*#\s*include "(.*)"', path.read_text(), re.M):
            target = (path.parent / include).resolve()
            rank = ORDER.index(target.relative_to(llmc).parts[0]) if llmc in target.parents else len(ORDER)
            if rank > ORDER.index(path.relative_to(llmc).parts[0]):
                wrong.append(f"{path.relative_to(ROOT)} includes {include}; the order is {' <- '.join(ORDER)}")
    assert wrong == []


def test_durations_use_a_monotonic_clock():
    """The time of day may be changed during a run."""
    wall = r"system_clock|high_resolution_clock|CLOCK_REALTIME|gettimeofday|\btime\((nullptr|0|NULL)\)"
    assert [path for path in (ROOT / "llmc").rglob("*.*") if re.search(wall, path.read_text())] == []
