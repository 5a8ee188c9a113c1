"""Writes prepared data: one safetensors file, which llmc/data/tokens.h reads.

    doc_offsets I64 (documents + 1)   document i holds the tokens doc_offsets[i] .. doc_offsets[i+1]-1
    tokens      U16 or I32 (N)        U16 where the vocabulary allows it
    loss_mask   U8 (N)                1: the token is a target, predicted from those before it; 0 for a document's first
    margin      F32 (pairs)           only of kind pref, and if any record has one; 0 where a record has none. Documents 2i and
                                      2i+1 are the chosen and the rejected one of pair i

    label       F32 (documents)       only of kind unpaired: 1 if the answer is desirable, else 0

    column_offsets I64, columns U8      only of kind rl, and if any record has other fields: bytes column_offsets[i] .. column_offsets[i+1]-1 of columns
                                      are a JSON object with those of record i, for reward functions

The metadata, all strings, are the arguments of TokenFile.write() and the checksums (llmc/data/tokens.h)."""

import json
import os
import shutil
import tempfile

import numpy as np
from xxhash import xxh3_64_intdigest

from errors import DataError
from whole_file import whole_file

DTYPES = {"U16": np.dtype("<u2"), "I32": np.dtype("<i4"), "U8": np.dtype("u1"), "I64": np.dtype("<i8"), "F32": np.dtype("<f4")}
LEAST_BLOCK, MOST_BLOCKS = 1 << 19, 4096  # fewest tokens of a block with a checksum; most blocks of a file, which keeps its header small


class TokenFile:
    """Collects documents, one lot after another, in bounded memory, and writes the file at the end, complete or not at all."""

    def __init__(self, path, vocab_size):
        self.path = path
        self.directory = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(self.directory) or os.path.isdir(path):
            raise DataError(f"{path}: cannot be written: its directory does not exist, or it is a directory itself",
                            f"mkdir -p {self.directory}, or give another --out")
        self.dtype = "U16" if vocab_size <= 65536 else "I32"
        try:  # temporary files have no name, so none remains after any exit
            self.tokens = tempfile.TemporaryFile(dir=self.directory)
            self.mask = tempfile.TemporaryFile(dir=self.directory)
        except OSError as error:
            raise DataError(f"{path}: cannot be written: {error.strerror}", "give --out a place that can be written to") from None
        self.lengths = []
        self.margins = []
        self.labels = []
        self.columns = []

    def append(self, tokens, mask, lengths, margins=(), labels=(), columns=()):
        """Appends documents. margins: one for each pair, NaN without one. labels, columns: a number and a JSON object for each document, or none."""
        self.tokens.write(tokens.astype(DTYPES[self.dtype]).tobytes())
        self.mask.write(mask.astype(np.uint8).tobytes())
        self.lengths.append(lengths)
        self.margins.append(np.array(margins, DTYPES["F32"]))
        self.labels.append(np.array(labels, DTYPES["F32"]))
        self.columns += [text.encode() for text in columns]

    def all_tokens(self):
        self.tokens.flush()
        return np.memmap(self.tokens, DTYPES[self.dtype], "r")

    def write(self, metadata):
        lengths = np.concatenate(self.lengths)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(DTYPES["I64"])
        margins, labels = np.concatenate(self.margins), np.concatenate(self.labels)
        count = int(offsets[-1])
        # The widest arrays come first, so that each is aligned.
        arrays = [("doc_offsets", "I64", offsets)]
        if not np.isnan(margins).all():
            arrays.append(("margin", "F32", np.nan_to_num(margins)))
        if len(labels):
            arrays.append(("label", "F32", labels))
        if any(text != b"{}" for text in self.columns):
            arrays.append(("column_offsets", "I64", np.concatenate([[0], np.cumsum([len(text) for text in self.columns])]).astype(DTYPES["I64"])))
            text = b"".join(self.columns)
            arrays.append(("columns", "U8", np.frombuffer(text + b" " * (-len(text) % 8), np.uint8)))  # keeps the tokens aligned
        tensors = [(name, dtype, len(array)) for name, dtype, array in arrays]
        tensors += [("tokens", self.dtype, count), ("loss_mask", "U8", count)]
        with whole_file(self.path) as file:
            file.write(header(tensors, {**metadata, "checksums": self._checksums(arrays, offsets)}))
            for _, _, array in arrays:
                file.write(array.tobytes())
            for part in (self.tokens, self.mask):
                part.seek(0)
                shutil.copyfileobj(part, file, 1 << 20)

    def _checksums(self, arrays, offsets):
        least = LEAST_BLOCK
        while offsets[-1] > least * MOST_BLOCKS:
            least *= 2
        checksum = 0
        for _, _, array in arrays:
            checksum = xxh3_64_intdigest(array.tobytes(), checksum)
        words = [str(least), f"{checksum:016x}"]
        begin = 0
        self.tokens.seek(0)
        self.mask.seek(0)
        while begin < offsets[-1]:
            end = offsets[min(np.searchsorted(offsets, begin + least), len(offsets) - 1)]
            tokens = np.frombuffer(self.tokens.read((end - begin) * DTYPES[self.dtype].itemsize), DTYPES[self.dtype])
            checksum = xxh3_64_intdigest(self.mask.read(end - begin), xxh3_64_intdigest(tokens.astype(DTYPES["I32"]).tobytes()))
            words.append(f"{checksum:016x}")
            begin = end
        return " ".join(words)

    def close(self):
        self.tokens.close()
        self.mask.close()


def header(tensors, metadata):
    """Returns the header, its length first; spaces pad it so that the arrays begin at a multiple of 8."""
    entries, begin = {"__metadata__": metadata}, 0
    for name, dtype, count in tensors:
        end = begin + count * DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": [count], "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
