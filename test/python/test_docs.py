"""The pages: links between them, and their names of files and flags of this repository. Includes between the folders of llmc go one way, and durations
are not of the time of day."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in ("data", "dev", "docs", "llmc", "scripts",
                                                          "test") for page in (ROOT / folder).rglob("*.md"))])
DOCS = [page for page in PAGES if page.parent == ROOT / "docs"]
MADE = re.compile(r"(.*\.plain|.*_emu|.*\.ptxas|build/.*|out/.*)")  # what `make` and runs write


def without_code(text):
    """Indented or fenced blocks, and code between backticks, hold no links and no headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", lambda code: re.sub(r"[\[\]()#]", "", code[0]), re.sub(r"^    .*$", "", text, flags=re.M))


def anchors(page):
    """The anchors of the headings, as GitHub makes them: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ +(.*)$", without_code(page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links(page):
    """(target file, anchor or "") of each link that does not leave the repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text()))
    parts = [target.partition("#") for target in targets if not re.match(r"[a-z]+:", target)]
    return [((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in parts]


def test_every_link_leads_somewhere():
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


def test_the_files_that_a_page_names_exist():
    names = [(page, name) for page in PAGES for name in re.findall(r"`((?:llmc|data|scripts|test|dev|docs)/[\w./-]+)`", page.read_text())]
    assert [(page, name) for page, name in names if not MADE.fullmatch(name) and "NAME" not in name and not (ROOT / name).exists()] == []


def test_every_flag_is_in_the_manual():
    flags = re.findall(r"^OPT\([\w:]+, (\w+),", (ROOT / "llmc/train/options.def").read_text(), re.M)
    assert len(flags) > 50
    manual = "".join(page.read_text() for page in DOCS if page.name not in ("porting.md", "benchmarks.md"))
    assert [flag for flag in flags if not re.search(rf"(`|--){flag}\b", manual)] == []


ORDER = ["core", "ops", "io", "data", "parallel", "model", "train", "app"]


def test_includes_go_one_way():
    """A folder of llmc may include itself and those before it, and nothing outside of llmc."""
    llmc, wrong = ROOT / "llmc", []
    for path in (path for path in llmc.rglob("*") if path.is_file()):
        for include in re.findall(r'^\s*#\s*include "(.*)"', path.read_text(), re.M):
            target = (path.parent / include).resolve()
            rank = ORDER.index(target.relative_to(llmc).parts[0]) if llmc in target.parents else len(ORDER)
            if rank > ORDER.index(path.relative_to(llmc).parts[0]):
                wrong.append(f"{path.relative_to(ROOT)} includes {include}; the order is {' <- '.join(ORDER)}")
    assert wrong == []


def test_durations_are_of_a_clock_that_does_not_jump():
    """The time of day may be set back or ahead in a run."""
    wall = r"system_clock|high_resolution_clock|CLOCK_REALTIME|gettimeofday|\btime\((nullptr|0|NULL)\)"
    assert [path for path in (ROOT / "llmc").rglob("*.*") if re.search(wall, path.read_text())] == []
