#!/usr/bin/env python3
"""Prints the first samples of a prepared file (0: all), with their trained tokens highlighted: show.py FILE.safetensors TOKENIZER_DIR NUMBER"""

import os
import sys
import unicodedata

from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from program import run

GREEN, YELLOW, DIM, RESET = "\033[32m", "\033[33m", "\033[2m", "\033[0m"
COLOR = {"trained": (GREEN, RESET), "untrained": (DIM, RESET), "partly": (YELLOW, RESET)}
MARKS = {"trained": ("⟦", "⟧"), "untrained": ("", ""), "partly": ("⟦~", "~⟧")}
LEGEND = {True: "green: trained, dim: not, yellow: only some bytes of a character are",
          False: "⟦trained⟧, ⟦~only some bytes of a character are~⟧"}


def shown(backend, ids, mask, color):
    """Returns the text of a document with its special tokens. Each run of trained tokens is in a colour or between marks."""
    styles = COLOR if color else MARKS
    runs = []
    for text, state in pieces(backend, ids, mask):
        if runs and runs[-1][1] == state:
            runs[-1][0] += text
        else:
            runs.append([text, state])
    return "".join(styles[state][0] + visible(text) + styles[state][1] for text, state in runs)


def pieces(backend, ids, mask):
    """Yields (text, state) of the smallest groups of tokens that form whole characters; most groups have one token."""
    stream, pending = DecodeStream(skip_special_tokens=False), []
    for token, target in zip(ids, mask):
        pending.append(bool(target))
        text = stream.step(backend, int(token))
        if text is not None:
            yield text, state_of(pending)
            pending = []
    if pending:  # the document ends inside a character
        yield "\N{REPLACEMENT CHARACTER}", state_of(pending)


def state_of(targets):
    return "trained" if all(targets) else "partly" if any(targets) else "untrained"


def visible(text):
    """Puts a sign before each line break, and replaces other control characters by escapes, because a terminal would execute them."""
    return "".join("↵\n" if c == "\n" else escaped(c) if unicodedata.category(c) == "Cc" else c for c in text)


def escaped(character):
    return character.encode("unicode_escape").decode()


def main(path, directory, count):
    backend = Tokenizer.from_file(os.path.join(directory, "tokenizer.json"))
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    sys.stdout.reconfigure(errors="backslashreplace")  # for a terminal without UTF-8
    with safe_open(path, "numpy") as file:
        are_pairs = file.metadata()["kind"] == "pref"
        labels = file.get_tensor("label") if file.metadata()["kind"] == "unpaired" else None
        tokens, mask = file.get_slice("tokens"), file.get_slice("loss_mask")
        offsets = file.get_tensor("doc_offsets").tolist()
        offsets = offsets[:int(count) * (2 if are_pairs else 1) + 1] if int(count) else offsets  # 0: all
        print(LEGEND[color])
        for i, (begin, end) in enumerate(zip(offsets, offsets[1:])):
            name = f"pair {i // 2 + 1}, {('chosen', 'rejected')[i % 2]}" if are_pairs else f"document {i + 1}"
            name += f", {('undesirable', 'desirable')[int(labels[i])]}" if labels is not None else ""
            ids, targets = tokens[begin:end], mask[begin:end]
            print(f"\n---- {name}: {end - begin:,} tokens, {targets.sum():,} trained\n{shown(backend, ids, targets, color)}")


if __name__ == "__main__":
    run(lambda: main(*sys.argv[1:]))
