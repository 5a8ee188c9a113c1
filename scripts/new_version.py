#!/usr/bin/env python3
"""Starts the next version of a kernel of the workshop: a copy of the last one, to be edited.

    scripts/new_version.py rope              version 5 in dev/cuda/rope.cu, a copy of the shipped one from llmc/ops
    scripts/new_version.py rope --from 3     a copy of version 3

Writes the copied kernels and their launcher above the ladder's struct, the launcher into `versions`, and a line into `.ideas`. Then edit them and run
`make try L=rope V=5`.
"""

import argparse
import re
import sys
from pathlib import Path

HEADING = re.compile(r"^// ---- version (\d+): (.*?) -*$", re.MULTILINE)
TABLE = re.compile(r"versions\[\]\)\((?:[^(){}]|\([^()]*\))*\) =\s*\{(.*?)\};", re.DOTALL)
IDEAS = re.compile(r"\.ideas = \{(.*?)\}\}", re.DOTALL)


def fail(problem, fix):
    sys.exit(f"{problem}\n  fix: {fix}")


def functions(text):
    """Yields (name, text) of each definition that starts in the first column, as clang-format places them; overloads share a name."""
    found, lines = [], []
    for line in text.splitlines():
        if not lines and (not line or re.match(r"[\s/#}]|(inline )?namespace|using|struct|constexpr|enum|static_assert", line)):
            continue
        lines.append(line)
        if line.endswith(";") and not line.startswith(" ") or line.startswith("}") or line.endswith("}") and not line.startswith(" "):
            body = "\n".join(lines)
            head = re.sub(r"__launch_bounds__\([^()]*\)|requires [^\n]*", "", body.partition("{")[0])
            name = re.search(r"(\w+)\(", head)
            if name and "{" in body and not re.search(r"\bstruct \w+ \{", body):
                found.append((name[1], body))
            lines = []
    return found


class Ladder:
    def __init__(self, root, name):
        self.root, self.name, self.path = root, name, root / f"dev/cuda/{name}.cu"
        if not self.path.exists():
            fail(f"there is no ladder {name}", "use one of " + " ".join(sorted(p.stem for p in self.path.parent.glob("*.cu") if p.stem != "timing")))
        self.source = self.path.read_text()
        self.launchers = [entry.strip() for entry in TABLE.search(self.source)[1].split(",")]
        self.struct = self.source.rindex("\ntemplate <class X> struct ", 0, TABLE.search(self.source).start()) + 1

    def copied(self, version):
        """Returns (name, text) of the functions to copy: the version's launcher, and the kernels and launchers in its file that it calls."""
        mark = next((m for m in HEADING.finditer(self.source) if int(m[1]) == version), None)
        if mark is None or version > len(self.launchers):
            return []
        after = HEADING.search(self.source, mark.end())
        own = functions(self.source[mark.end():after.start() if after else self.struct])
        if mark[2].startswith("llmc/"):
            own = functions((self.root / mark[2]).read_text()) + own
        launcher = re.match(r"\w+", self.launchers[version - 1])[0]
        own = [(name, body) for name, body in own if not re.match(r"[^{]*__device__", body)]
        reached, ahead = set(), [launcher]
        while ahead:
            name = ahead.pop()
            if name not in reached:
                reached.add(name)
                ahead += [word for other, body in own if other == name for word in re.findall(r"\w+", body)]
        copied = [(name, body) for name, body in own if name in reached]
        no_kernels = "__global__" not in self.source  # a ladder of schedules
        return copied if no_kernels or any("__global__" in body for _, body in copied) else []

    def add(self, version):
        """Returns the number of the new version."""
        bodies, new = self.copied(version), len(self.launchers) + 1
        launcher = self.launchers[version - 1]
        names = {old: f"{re.sub(r'[0-9]+$', '', old)}{new}" for old, _ in bodies}

        def renamed(text):
            return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), text)

        heading = f"// ---- version {new}: a copy of version {version} "
        section = (heading + "-" * (131 - len(heading)) + "\n//\n// Its idea, the bytes or FLOP it costs, and what limits it.\n\n" +
                   "\n\n".join(renamed(body) for _, body in bodies) + "\n\n")
        above = HEADING.sub(lambda mark: mark[0].replace(mark[1], str(int(mark[1]) + (int(mark[1]) >= new)), 1), self.source[:self.struct])
        source = above + section + self.source[self.struct:]
        table = TABLE.search(source)
        source = source[:table.end(1)] + f", {renamed(launcher)}" + source[table.end(1):]
        ideas = IDEAS.search(source)
        said = re.findall(r'(?:"[^"]*"\s*)+', ideas[1])
        said.insert(new - 1, f'"a copy of version {version}"')
        source = source[:ideas.start(1)] + ",\n               ".join(idea.strip() for idea in said) + source[ideas.end(1):]
        self.path.write_text(source)
        return new


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ladder")
    parser.add_argument("--from", dest="version", type=int, help="the version to copy; by default the last one with its own kernel")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help=argparse.SUPPRESS)
    args = parser.parse_args()
    ladder = Ladder(args.root, args.ladder)
    with_kernels = [v for v in range(1, len(ladder.launchers) + 1) if ladder.copied(v)]
    if not with_kernels:
        fail(f"no version of {args.ladder} has its own kernel in dev/cuda/{args.ladder}.cu or in the file that its heading names",
             "copy it by hand")
    version = args.version or with_kernels[-1]
    if version not in with_kernels:
        fail(f"version {version} of {args.ladder} has no kernel in dev/cuda/{args.ladder}.cu or in the file of llmc/ops that its "
             "heading names",
             f"give --from one of {', '.join(map(str, with_kernels))}")
    new = ladder.add(version)
    print(f"dev/cuda/{args.ladder}.cu: version {new} is a copy of version {version}\nnow edit it, and: make try L={args.ladder} V={new}")


if __name__ == "__main__":
    main()
