"""Shows documents with their trained tokens highlighted."""

import unicodedata

from tokenizers.decoders import DecodeStream

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
