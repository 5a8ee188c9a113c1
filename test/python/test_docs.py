"""The pages: links between them, and their names of files and flags of this repository."""
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in ("data", "dev", "docs", "llmc", "scripts", "test") for page in (ROOT / folder).rglob("*.md"))])
DOCS = [page for page in PAGES if page.parent == ROOT / "docs"]
MADE = re.compile(r"(.*\.plain|.*_emu|.*\.ptxas|build/.*|out/.*)")  # what `make` and runs write


def name_of(page):
    return str(page.relative_to(ROOT))


def without_code(text):
    """Indented or fenced blocks, and code between backticks, hold no links and no headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", lambda code: re.sub(r"[\[\]()#]", "", code[0]), re.sub(r"^    .*$", "", text, flags=re.M))


def anchors(page):
    """Of each heading, as GitHub makes them: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ +(.*)$", without_code(page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links(page):
    """(target file, anchor or "") of each link that does not leave the repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text()))
    parts = [target.partition("#") for target in targets if not re.match(r"[a-z]+:", target)]
    return [((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in parts]


def broken_links(page):
    return [
        f"{path}#{anchor}" for path, anchor in links(page) if not path.exists() or (anchor and anchor not in anchors(path))
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page):
    assert broken_links(page) == []


def test_a_broken_link_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Some `code`, and words\n[a](#some-code-and-words) [b](#others) [c](gone.md) [d](page.md#gone) `[e](f.md)`\n\n    [g](h.md)\n")
    assert broken_links(page) == [f"{page}#others", f"{tmp_path / 'gone.md'}#", f"{page}#gone"]


def test_readme_is_a_front_page():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 220
    first = [line for line in lines if re.search("make train_(gpt2|llama) && ./train_", line)]
    assert len(first) == 2 and all(line.startswith("    make deps && ") for line in first)  # on a fresh machine, too


def test_every_page_is_reachable_from_the_readme():
    seen, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page in seen:
            continue
        seen.add(page)
        ahead += [path for path, _ in links(page) if path.suffix == ".md"]
    assert [name_of(page) for page in PAGES if page not in seen] == []


@pytest.mark.parametrize("page", DOCS, ids=name_of)
def test_a_page_begins_with_what_its_reader_can_do(page):
    title, empty, first = page.read_text().splitlines()[:3]
    assert title.startswith("# ") and empty == ""
    assert page.name == "benchmarks.md" or first.startswith("After this page you can "), first


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_files_that_a_page_names_exist(page):
    names = re.findall(r"`((?:llmc|data|scripts|test|dev|docs)/[\w./-]+)`", page.read_text())
    assert [name for name in names if not MADE.fullmatch(name) and "NAME" not in name and not (ROOT / name).exists()] == []


def test_every_flag_is_in_the_manual():
    flags = re.findall(r"^OPT\([\w:]+, (\w+),", (ROOT / "llmc/train/options.def").read_text(), re.M)
    assert len(flags) > 50
    manual = "".join(page.read_text() for page in DOCS if page.name not in ("porting.md", "benchmarks.md"))
    assert [flag for flag in flags if not re.search(rf"(`|--){flag}\b", manual)] == []
