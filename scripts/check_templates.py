#!/usr/bin/env python3
"""Prepares chats with every chat template of TRL, and compares the targets with TRL's own marks. The table is in docs/data.md.

    scripts/check_templates.py [--trl DIR] [--write]      DIR: TRL, installed or unpacked (default: .venv-compare); any folder of .jinja files

TRL has two versions of many templates: the original, and NAME_training.jinja with {% generation %} marks around the trained text.
data/prepare.py infers the trained text of the original and follows the marks of its twin, so the two versions check each other. Each message
of the chats contains a unique word; regardless of the twin's marks, the assistant's words, and no others, must be trained.
"""
import argparse
import glob
import re
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "data"))

import prepare  # noqa: E402
from errors import DataError  # noqa: E402
from records import Record  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402

PAGE = ROOT / "docs" / "data.md"
BEGIN, END = "<!-- made by scripts/check_templates.py --write -->\n", "<!-- end -->\n"
# Text that looks like a special token: <|im_end|>, <turn|>, [|user|], <｜User｜>, <s>, <end_of_turn>, [INST].
SPECIAL = re.compile(r"<\|[\w /]+\|?>|\[\|\w+\|\]|<[\w ]+\|>|<｜[^｜]+｜>|</?s>|<(?:start|end)_of_\w+>|\[/?[A-Z_]{3,}\]")
BOS, EOS = "<bos>", "<eos>"
EMPTY = re.compile(r"\s*(<think>\s*</think>\s*)?")


def user(number):
    return {"role": "user", "content": f"question{number}"}


def assistant(number, **more):
    return {"role": "assistant", "content": f"answer{number}", **more}


def parts(message):
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


SYSTEM = {"role": "system", "content": "rule0"}
TOOL = {"type": "function", "function": {"name": "look", "description": "It looks.", "parameters": {
    "type": "object", "properties": {"place": {"type": "string", "description": "Where."}}, "required": ["place"]}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "call00001", "type": "function", "function": {
    "name": "look", "arguments": {"place": "answer1"}}}]}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "look", "content": "result2"}
TURNS = [user(0), assistant(1), user(2), assistant(3)]
REASONED = [user(0), assistant(1, reasoning_content="answer4"), user(2), assistant(3, reasoning_content="answer5")]
CHATS = {
    "one turn": {"messages": TURNS[:2]},
    "turns": {"messages": TURNS},
    "system": {"messages": [SYSTEM, *TURNS]},
    "tools": {"messages": [user(0), CALL, RESULT, assistant(3)], "tools": [TOOL]},
    "reasoning": {"messages": REASONED},
    "thinking off": {"messages": TURNS, "chat_template_kwargs": {"enable_thinking": False}},
    "thinking on": {"messages": REASONED, "chat_template_kwargs": {"enable_thinking": True}},
    "parts": {"messages": [parts(message) for message in TURNS]},
}


class Outcome(NamedTuple):
    """Result of preparing a chat: its tokens as text and their target mask, or the reason for a refusal."""

    tokens: list = []
    mask: list = []
    prompt: str = ""  # the text before the first answer
    open_turns: int = 0  # answers after which no special token is trained
    refusal: str = ""

    def trained(self, value=1):
        return "".join(token if target == value else "\0" for token, target in zip(self.tokens, self.mask))


def save_tokenizer(folder, templates):
    """Saves a byte-level BPE without merges. Its special tokens are all texts in the templates that look like one."""
    from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(sorted({BOS, EOS, *(found for text in templates for found in SPECIAL.findall(text))}))
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS).save_pretrained(folder)


class Preparer:
    """data/prepare.py with one template."""

    def __init__(self, folder, template):
        options = prepare.build_parser().parse_args(["sft", "--input", "-", "--tokenizer", folder, "--out", "-", "--max_len", "1000000"])
        self.tokenizer = Tokenizer(folder, template)
        self.recipe = prepare.Recipe("sft", options, self.tokenizer)

    def outcome(self, fields):
        try:
            lot = self.recipe.lot([Record("the chat", 1, None, fields, 0)])
        except DataError as error:
            return Outcome(refusal=re.sub(r" \(roles: .*\)$", "", error.what.removeprefix("record 1 of the chat: ")))
        if not len(lot.tokens):
            return Outcome(refusal="no token is trained")
        prompt, _ = self.recipe.template.prompt([user(0)], {"tools": None, **fields.get("chat_template_kwargs", {})})
        return Outcome([self.tokenizer.hf.decode([i]) for i in lot.tokens], lot.mask.tolist(), prompt, lot.counts["open turns"])


def words(fields):
    """Returns the assistant's words, and the words of all other roles."""
    found = set(re.findall(r"(?:rule|question|answer|result)\d", str(fields)))
    return {word for word in found if word.startswith("answer")}, {word for word in found if not word.startswith("answer")}


def faults(outcome, fields):
    """Yields sentences about wrongly trained, untrained or lost words. A template may omit reasoning."""
    own, others = words(fields)
    yield from (f"`{word}` of another role is trained" for word in sorted(others) if word in outcome.trained())
    yield from (f"the assistant's `{word}` is not trained" for word in sorted(own) if word in outcome.trained(0))
    contents = {word for word in own if word in "answer1 answer3"}
    yield from (f"the assistant's `{word}` is lost" for word in sorted(contents) if word not in "".join(outcome.tokens))
    if "'type': 'text'" in "".join(outcome.tokens):
        yield "a list of parts is rendered as a Python list"


def differences(outcome, twin):
    """Yields (whether the twin trains them, text, whether an answer follows) for runs of tokens that only one version trains."""
    runs = [(masks, "".join(token for token, *_ in run))
            for masks, run in groupby(zip(outcome.tokens, outcome.mask, twin.mask), key=lambda triple: triple[1:])]
    for (masks, text), (following, _) in zip(runs, [*runs[1:], ((0, 0), "")]):
        if masks[0] != masks[1]:
            yield bool(masks[1]), text, following == (1, 1)


def is_convention(outcome, marked, text, leads):
    return marked and (leads and text in outcome.prompt or EMPTY.fullmatch(text) is not None)


def verdict(outcome, twin, fields):
    """Returns signs of SIGNS, or a sentence on the difference."""
    if outcome.refusal:
        return f"refused: {outcome.refusal}"
    wrong = list(faults(outcome, fields))
    if wrong:
        return "; ".join(wrong)
    end = "°" if outcome.open_turns else ""
    if twin is None or twin.refusal or twin.tokens != outcome.tokens:
        return "✓" + end
    found = list(differences(outcome, twin))
    unusual = [(marked, text) for marked, text, leads in found if not is_convention(outcome, marked, text, leads)]
    if not unusual:
        return ("~" if found else "=") + end
    return "; ".join(f"{'only the marks train' if marked else 'the marks do not train'} `{text!r}`" for marked, text in dict.fromkeys(unusual))


SIGNS = {
    "=": "the marks train the same tokens",
    "~": "the marks also train the generation prompt (`<|im_start|>assistant`), an empty think block, or the line break after the turn",
    "✓": "this text has no marks to compare with; the assistant's words, and no others, are trained",
    "°": "no special token ends the turn, so the model does not learn to stop; prepare.py reports this (GLM ends a turn with the start of the user's turn, `<|user|>`)",
}


def check(plain, marked=None):
    """Returns {chat: verdict} for a template and, if it has one, its twin."""
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(folder, [text for text in (plain, marked) if text])
        preparer, twin = Preparer(folder, plain), marked and Preparer(folder, marked)
        return {name: verdict(preparer.outcome(fields), twin.outcome(fields) if twin else None, fields) for name, fields in CHATS.items()}


def table(templates):
    """Returns a Markdown table for {name: text}, followed by its legend and numbered sentences. NAME_training is the twin of NAME."""
    rows, notes = {}, {}  # templates by their cells
    plain = [name for name in templates if not name.endswith("_training")]
    for name in plain:
        verdicts = check(templates[name], templates.get(f"{name}_training")).values()
        cells = [v if v[0] in SIGNS else str(notes.setdefault(v, len(notes) + 1)) for v in verdicts]
        rows.setdefault(" | ".join(cells), []).append(name)
    lines = [f"| templates | {' | '.join(CHATS)} |", "|---" * (1 + len(CHATS)) + "|", *(f"| {', '.join(names)} | {cells} |" for cells, names in rows.items()), ""]
    lines += [*(f"- {sign} {meaning}" for sign, meaning in SIGNS.items()), ""]
    lines += [f"{number}. {note}" for note, number in notes.items()]
    return "\n".join([*lines, ""])


def find_templates(folder):
    paths = sorted(Path(folder).rglob("*.jinja"), key=lambda path: path.stem)
    if not paths:
        sys.exit(f"{folder} contains no template (*.jinja)\n  fix: --trl with the directory of TRL, or scripts/install_compare.sh")
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", default=next(iter(glob.glob(str(ROOT / ".venv-compare/lib/*/site-packages/trl"))), ".venv-compare"))
    parser.add_argument("--write", action="store_true", help="update the table in docs/data.md")
    options = parser.parse_args()
    text = table(find_templates(options.trl))
    if not options.write:
        print(text)
        return
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + text + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
