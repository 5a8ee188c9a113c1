"""Reads and writes the token shards of llm.c and its data tools: a header of 256 int32 (magic, version, tokens), then the tokens as uint16.

A shard is a stream with an end-of-text token before each document. When it is read, each document gets that token at both ends,
as text gets BOS and EOS; there is none where the shard begins or ends within a document. When documents are written, two end-of-text tokens
in a row become one again."""

import contextlib
import glob
import os

import numpy as np

from errors import DataError
from whole_file import whole_file

MAGIC, VERSION, HEADER = 20240520, 1, 256
SHARD_TOKENS = 10**8  # tokens of a written shard, as in llm.c's scripts


def open_shard(path):
    size = os.path.getsize(path)
    header = np.fromfile(path, "<i4", HEADER)
    problem = ("is shorter than its header" if len(header) < HEADER else
               f"begins with {header[0]}, not with {MAGIC}" if header[0] != MAGIC else
               f"is of version {header[1]}, not {VERSION}" if header[1] != VERSION else None)
    if problem:
        raise DataError(f"{path}: is not an llm.c shard of GPT-2 tokens: it {problem}",
                        "give a .bin file of llm.c's dev/data scripts, or the text itself")
    if size != 4 * HEADER + 2 * int(header[2]):
        raise DataError(f"{path}: has {size} bytes, but a shard of {header[2]} tokens has {4 * HEADER + 2 * int(header[2])}",
                        "copy or make the file again")
    return np.memmap(path, "<u2", "r", 4 * HEADER) if header[2] else np.empty(0, "<u2")


def read_shard(path, end_of_text):
    """Yields the documents of a shard."""
    if end_of_text is None:
        raise DataError(f"{path}: the tokenizer has no eos_token, which separates the documents of a shard",
                        "set it in tokenizer_config.json")
    if end_of_text > 65535:
        raise DataError(f"{path}: was made with another vocabulary: its tokens have 16 bits, but the end-of-text token here is {end_of_text}",
                        "use the tokenizer or model that its ids were made for")
    tokens = open_shard(path)
    ends = np.flatnonzero(tokens == end_of_text)
    begins = np.unique([0, *ends])
    for begin, end in zip(begins, [*begins[1:] + 1, len(tokens)]):
        if end - begin > 1 or len(tokens) == 1:  # otherwise it is only the end-of-text token of the last document
            yield None, {"input_ids": tokens[begin:end].astype(np.int32)}, 2 * (end - begin)


def check_prefix(prefix, tokenizer):
    """Refuses, before any work is done, a prefix or vocabulary that write_shards() could not write."""
    if tokenizer.vocab_size > 65536:
        raise DataError(f"--to_bin {prefix}: the vocabulary has {tokenizer.vocab_size} ids, and the tokens of a shard have 16 bits",
                        "leave --to_bin out, or use a tokenizer with at most 65536 ids, such as GPT-2's")
    if not os.path.isdir(os.path.dirname(os.path.abspath(prefix))):
        raise DataError(f"--to_bin {prefix}: its directory does not exist", f"mkdir -p {os.path.dirname(os.path.abspath(prefix))}")
    if there := glob.glob(f"{glob.escape(prefix)}_[0-9]*.bin"):
        raise DataError(f"--to_bin {prefix}: there is {min(there)}, which would be read as a part of the new data",
                        "remove the old shards, or give another prefix")


def write_shards(prefix, tokens, lengths, end_of_text):
    """Writes PREFIX_000000.bin and so on, all of them or none, and returns their number. tokens (N) uint16 are documents of these lengths."""
    starts = np.cumsum(lengths)[:-1]
    again = starts[(tokens[starts] == end_of_text) & (tokens[starts - 1] == end_of_text)]  # the second of two end-of-text tokens in a row
    firsts = np.arange(0, len(tokens) - len(again), SHARD_TOKENS)  # the first token of each shard, counted without `again`
    begins = firsts + np.searchsorted(again - np.arange(len(again)), firsts, "right")
    paths = [f"{prefix}_{i:06}.bin" for i in range(len(begins))]
    with contextlib.ExitStack() as files:  # they get their final names together, after all are written
        for path, begin, end in zip(paths, begins, [*begins[1:], len(tokens)]):
            write_shard(files.enter_context(whole_file(path)), np.delete(tokens[begin:end], again[(again >= begin) & (again < end)] - begin))
    return len(paths)


def write_shard(file, tokens):
    header = np.zeros(HEADER, "<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    file.write(header.tobytes() + tokens.astype("<u2").tobytes())
