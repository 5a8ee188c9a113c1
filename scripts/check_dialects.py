#!/usr/bin/env python3
"""Converts every command line and file in checkouts of other trainers with --convert, and counts conversions and refusals by trainer and cause.

    scripts/check_dialects.py CHECKOUT... [--show N] [--list FILE]

A checkout is one of OpenRLHF, TRL, verl, Axolotl, LLaMA-Factory or ms-swift. Files are read from the folder examples of Axolotl and LLaMA-Factory,
command lines from the scripts and pages of the others. --show prints N complete answers, drawn at random with a fixed seed; --list writes all
answers to a file."""

import argparse
import collections
import random
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STARTS = {"OpenRLHF": r"openrlhf\.cli\.train_\w+", "TRL": r"\b(?:accelerate launch|python3?)\b.*?(?:scripts/(?:\w+/)?\w+\.py|trl\.scripts\.\w+)|\btrl (?:sft|dpo|reward|grpo|rloo|kto)\b",
          "ms-swift": r"(?:swift|megatron) (?:sft|pt|rlhf)\b", "verl": r"\b(?:verl\.trainer\.main_ppo|recipe\.dapo\.main_dapo)\b"}
# The supported architectures; files of others are counted separately.
FAMILIES = re.compile(r"llama|mistral|qwen|phi-3|smollm|yi-|gpt2|skywork|cogito|deepcoder|plano|zephyr", re.I)
OTHERS = re.compile(r"mixtral|moe|llama-?4|vision|vl-|-vl|pixtral|-a\d+b|next|bitnet|qwen-7b|llava|small-3|mistral-small|mistral-medium|ministral-3|qwen3\.5|dbrx|gemma|falcon|"
                    r"jamba|nemotron|xgen|mamba|moondream|voxtral|qwen2\.5-omni|smolvlm|GPTQ|linearized", re.I)


def peer_of(checkout):
    for peer, mark in (("OpenRLHF", "openrlhf/cli"), ("TRL", "trl/trainer"), ("Axolotl", "src/axolotl"), ("LLaMA-Factory", "src/llamafactory"), ("ms-swift", "swift/trainers"),
                       ("verl", "verl/trainer")):
        if (checkout / mark).is_dir():
            return peer
    sys.exit(f"{checkout} is not a checkout of a known trainer\n  fix: give one of OpenRLHF, TRL, verl, Axolotl, LLaMA-Factory or ms-swift")


def lines_in(text):
    """Yields the command lines in a script, a page or a comment, with their continuation lines."""
    for name, words in re.findall(r"^(\w+)=\(\n(.*?)^\)", text, re.M | re.S):  # arrays of bash
        values = " ".join(line.split(" #")[0].strip() for line in words.splitlines() if not line.strip().startswith("#"))
        text = re.sub(rf'"?\$\{{{name}\[@\]\}}"?', lambda _, values=values: values, text)
    text = re.sub(r"\\+[ \t]*\n[ \t#>]*", " ", text)
    for line in text.splitlines():
        yield line.strip(" \t#>`$\"'")


def values_in(text):
    """Returns a function that replaces the variables of a script by their values, or by their names in small letters."""
    values = {}

    def replaced(word):
        word = re.sub(r"\$\{\w+\[@\].*?\}", "", word)  # an array of one line
        for _ in range(5):  # a value may have others
            word = re.sub(r"\$\{(\w+):-((?:[^{}]|\{[^{}]*\})*)\}", lambda found: values.get(found[1], found[2]), word)
            word = re.sub(r"\$\{?(\w+)\}?", lambda found: values.get(found[1], found[1].lower()), word)
            word = re.sub(r"\$\(\(([\d\s+*]+)\)\)", lambda found: str(eval(found[1])), word)
        return re.sub(r"\$\(.*?\)", "x", word)

    for name, value in re.findall(r"^\s*(?:export )?(\w+)=([^(\n].*?)\s*(?:#.*)?$", text, re.M):
        values[name] = replaced(value.strip("\"'"))
    return replaced


def files_of(text, page, folder):
    """Writes the blocks of YAML of a page that begin with their name, as "# sft_config.yaml", to files. Returns (where the block stands, its name, the file)."""
    blocks = [(found.start(), found[1], found[2]) for found in re.finditer(r"```ya?ml\n# (\S+\.ya?ml)\n(.*?)```", text, re.S)]
    out = []
    for number, (place, name, block) in enumerate(blocks):
        file = folder / f"{page.stem}_{number}_{name}"
        file.write_text(block)
        out.append((place, name, str(file)))
    return out


def read_lines(checkout, peer, folder):
    start = re.compile(STARTS[peer])
    for path in sorted(checkout.rglob("*")):
        if path.suffix not in (".sh", ".md", ".py", ".slurm", ".rst") or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        files, replaced = files_of(text, path, folder), values_in(text)
        for line in lines_in(text):
            found = start.search(line)
            if not found or ("=" if peer == "verl" else " --") not in line or "..." in line:
                continue
            line, whole = line[found.start():], line
            try:
                words = shlex.split(re.sub(r'"""$|\s"?\$@.*|\s2>&1.*|\s\|\s.*|\s&$|\s>\s.*', "", line), comments=True)
            except ValueError:
                continue
            if files and words:  # the last block of that name before the line
                place = text.find(whole, files[0][0])
                words = [next((file for at, name, file in reversed(files) if name == word and at < place), word) for word in words]
            words = [replaced(word) if peer == "verl" else re.sub(r"\$\{?(\w+)\}?", lambda name: name[1].lower(), word) for word in words if word != "\\"]
            yield f"{path.relative_to(checkout)}: {' '.join(words)[:110]}", [word for word in words if word.strip()]


def read_files(checkout, peer):
    import yaml

    for path in sorted((checkout / "examples").rglob("*.y*ml")):
        try:
            value = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError:
            continue
        key = "base_model" if peer == "Axolotl" else "model_name_or_path"
        if isinstance(value, dict) and key in value:
            yield f"{path.relative_to(checkout)}: {value[key]}", (["axolotl", "train"] if peer == "Axolotl" else ["llamafactory-cli", "train"]) + [str(path)]


def is_promised(model):
    return bool(FAMILIES.search(model)) and not OTHERS.search(model)


def group_of(peer, name):
    if peer == "Axolotl":
        return "promised families" if is_promised(name) else "other families"
    if peer == "TRL":
        return "sft, dpo, reward, grpo" if re.search(r"\b(sft|dpo|reward|reward_modeling|grpo|gspo)(\.py\b| )", name.split(" --")[0] + " ") else "other scripts"
    return "all"


def cause_of(message):
    """Returns the first lines of the problems, without their values."""
    heads = re.findall(r"^(.*)\n  fix: ", re.sub(r"^train_llama: ", "", message), re.M)
    return [re.sub(r' in /\S+| of \w+( \(\d\))? in /\S+', "", re.sub(r'"[^"]*"', "...", head))[:110] for head in heads]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", metavar="CHECKOUT", nargs="+", type=lambda path: Path(path).resolve())
    parser.add_argument("--show", type=int, default=0, metavar="N")
    parser.add_argument("--list", type=Path, metavar="FILE")
    options = parser.parse_args()
    answers, folder = [], tempfile.TemporaryDirectory()
    for checkout in options.checkouts:
        peer = peer_of(checkout)
        cases = list(read_files(checkout, peer) if peer in ("Axolotl", "LLaMA-Factory") else read_lines(checkout, peer, Path(folder.name)))
        groups = collections.defaultdict(lambda: [0, 0, collections.Counter()])
        for name, words in cases:
            result = subprocess.run([ROOT / "train_llama", *words, *(["--reward", "r.py"] if peer == "verl" else []), "--convert"], cwd=checkout, capture_output=True, text=True)
            group = f"{peer}, {group_of(peer, name)}"
            groups[group][0] += 1
            groups[group][1] += result.returncode == 0
            groups[group][2].update(set(cause_of(result.stderr)))
            answers.append(f"== {name}\n{result.stdout}{result.stderr}")
        for group, (tried, whole, causes) in sorted(groups.items()):
            print(f"{group}: {whole} of {tried} converted")
            for cause, count in causes.most_common():
                print(f"  {count:4} {cause}")
    if options.list:
        options.list.write_text("\n".join(answers))
    for answer in random.Random(42).sample(answers, min(options.show, len(answers))):
        print(answer)


if __name__ == "__main__":
    main()
