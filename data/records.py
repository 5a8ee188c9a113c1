"""Reads records, one at a time, from JSON lines, JSON, CSV, parquet, llm.c's token shards, directories of them, or a data set on the hub."""

import csv
import gzip
import io
import itertools
import json
import os
import sys
from typing import Any, NamedTuple, Optional

import numpy as np

from errors import DataError
from json_yaml import once
from shards import read_shard
from sources import COMPRESSED, check, hub_records, slices_of, source_of, splits_of
from tables import Undecoded, records_of, saved_records


class Fields(dict):
    """The fields of a record. It remembers the used fields, so that every unused one is counted."""

    def __init__(self, fields):
        super().__init__(fields)
        self.used = set()

    def __getitem__(self, name):
        self.used.add(name)
        return super().__getitem__(name)

    def unused(self):
        return [name for name, value in self.items() if name not in self.used and value not in (None, "", [], {})]


class Record(NamedTuple):
    source: str
    number: int  # from 1
    line: Optional[int]  # from 1, if the source has lines
    raw: Any  # a dict, or the bytes of one JSON object, which fields() parses
    size: int  # approximate bytes in its source

    def where(self):
        line = f" (line {self.line})" if self.line else ""
        return f"record {self.number}{line} of {self.source}"

    def fields(self):
        if not isinstance(self.raw, bytes):
            value = self.raw
        else:
            try:
                value = json.loads(self.raw, object_pairs_hook=once)
            except ValueError as error:  # not JSON, or not UTF-8
                if "int_max_str_digits" in str(error):
                    raise DataError("has an integer of more than 4,300 digits", "write it as a text in quotes") from None
                raise DataError(f"broken JSON: {error}", "write one whole JSON object per line, in UTF-8") from None
        if not isinstance(value, dict):
            raise DataError(f"is a JSON {json_kind(value)}, not an object", 'write a record as an object: {"messages": [...]}')
        return Fields(value)


def json_kind(value):
    if isinstance(value, Undecoded):
        return f"value of Arrow's type {value.extension}"
    kinds = {list: "list", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null", dict: "object"}
    return kinds.get(type(value), type(value).__name__)


def check_inputs(names):
    """Refuses, before any work is done, inputs that read_records() could not open."""
    for name in names:
        check(source_of(name))


def total_size(names):
    """Returns the approximate sum of the sizes of all records, or None if it is unknown."""
    if not all(os.path.isfile(name) and not name.endswith(COMPRESSED) for name in names):
        return None
    return sum(parquet_size(name) if name.endswith(".parquet") else os.path.getsize(name) for name in names)


def read_records(names, end_of_text, probs=None, strategy=None, seed=0, max_samples=None):
    """Yields the first max_samples records of each input, one input after another or, with probs or a strategy, in the order of interleaved()."""
    inputs = [lambda name=name: itertools.islice(read_input(name, end_of_text), max_samples) for name in names]
    if probs or strategy:
        return interleaved(inputs, probs, strategy or "all_exhausted", seed)
    return itertools.chain.from_iterable(open_input() for open_input in inputs)


def read_input(name, end_of_text):
    empty = True
    for record in read_source(source_of(name), end_of_text):
        empty = False
        yield record
    if empty:
        raise DataError(f"{name}: contains no records", "give --input a file with records")


def read_source(source, end_of_text):
    splits = splits_of(source)
    if splits is None:
        yield from numbered(source.text, hub_records(source))
        return

    def length_of(split):
        return sum(count_records(file, end_of_text) for file in split) if isinstance(split, list) else len(split)

    for name, begin, end in slices_of(source, splits, length_of):
        yield from itertools.islice(read_split(source, splits[name], end_of_text), begin, end)


def read_split(source, split, end_of_text):
    if not isinstance(split, list):
        yield from numbered(source.text, saved_records(source.text, split))
        return
    for file in split:
        yield from numbered(file, read_file(file, end_of_text))


def numbered(source, records):
    return (Record(source, number, line, raw, size) for number, (line, raw, size) in enumerate(records, 1))


def count_records(path, end_of_text):
    return open_parquet(path).metadata.num_rows if path.endswith(".parquet") else sum(1 for _ in read_file(path, end_of_text))


def read_file(path, end_of_text):
    readers = {".jsonl": read_json_lines, ".json": read_json, ".csv": read_csv, ".parquet": read_parquet,
               ".bin": lambda path: read_shard(path, end_of_text)}
    kind = os.path.splitext(os.path.splitext(path)[0] if path.endswith(COMPRESSED) else path)[1]
    return readers[kind](path)


def open_bytes(path):
    """Opens a file for reading, and decompresses it if it is compressed."""
    if not path.endswith(COMPRESSED):
        return open(path, "rb")
    if path.endswith(".gz"):
        return gzip.open(path)
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(path, compression="detect"))


def interleaved(inputs, probs, strategy, seed):
    """Takes one record of each input in turn or, with probs, each record from a random input, until the first input (first_exhausted) or every input has
    been read to its end. An input that ends earlier starts again (all_exhausted) or is left out (all_exhausted_without_replacement). The order equals
    datasets.interleave_datasets(..., stopping_strategy=strategy)."""
    streams = [open_input() for open_input in inputs]
    ahead = [next(stream) for stream in streams]
    unread = set(range(len(inputs)))
    for turn in turns(len(inputs), probs, seed):
        for i in turn:
            if ahead[i] is None:
                continue
            yield ahead[i]
            ahead[i] = next(streams[i], None)
            if ahead[i] is None:
                unread.discard(i)
                if strategy == "all_exhausted":
                    streams[i] = inputs[i]()
                    ahead[i] = next(streams[i])
        if not unread or strategy == "first_exhausted" and len(unread) < len(inputs):
            return


def turns(count, probs, seed):
    """Yields lists of inputs: all of them, or with probs one, which is random."""
    random = np.random.default_rng(seed)
    while True:
        if probs:
            yield from ([i] for i in random.choice(count, size=1000, p=np.array(probs) / sum(probs)))
        else:
            yield range(count)


def read_json_lines(path):
    try:
        with open_bytes(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line, len(line)
    except (OSError, EOFError) as error:
        if not path.endswith(COMPRESSED):
            raise
        raise DataError(f"{path}: broken compression: {error}", "compress or copy the file again") from None


def read_json(path):
    """Reads a .json file: one list of records, or JSON lines, which are as common."""
    with open_bytes(path) as file:
        is_list = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    if not is_list:
        yield from read_json_lines(path)
        return
    try:
        with open_bytes(path) as file:
            records = json.loads(file.read(), object_pairs_hook=once)
    except DataError as error:
        raise DataError(f"{path}: {error.what}", error.fix) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: broken JSON: {error}", "write the .json file as one list of objects") from None
    for record in records:
        yield None, record, os.path.getsize(path) // len(records)


def read_csv(path):
    """Reads every cell as a string: the reader never interprets a cell as a number or as a missing value."""
    csv.field_size_limit(sys.maxsize)
    with io.TextIOWrapper(open_bytes(path), newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file, strict=True)
        line = 1
        try:
            header = next(rows, [])
            check_header(path, header)
            line = rows.line_num + 1  # first line of the next row
            for row in rows:
                if row and len(row) != len(header):
                    raise DataError(f"line {line} of {path}: has {len(row)} cells but the header has {len(header)}",
                                    "put cells that hold commas or line breaks in double quotes")
                if row:
                    yield line, dict(zip(header, row)), sum(map(len, row)) + len(row)
                line = rows.line_num + 1
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}: broken CSV at line {line}: {error}", "write CSV in UTF-8 with a header line") from None


def check_header(path, names):
    if len(set(names)) != len(names):
        raise DataError(f"{path}: its header has {next(name for name in names if names.count(name) > 1)!r} twice", "leave one of them out")


def open_parquet(path):
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: broken parquet file: {error}", "write the file again") from None


def parquet_size(path):
    metadata = open_parquet(path).metadata
    return sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))


def read_parquet(path):
    file = open_parquet(path)
    check_header(path, file.schema_arrow.names)
    size = parquet_size(path) // max(1, file.metadata.num_rows)
    try:
        for fields in records_of(path, file.schema_arrow, file.iter_batches(batch_size=500)):
            yield None, fields, size
    except (ValueError, OSError) as error:  # a damaged page, or names that are twice in one object
        raise DataError(f"{path}: broken parquet file: {error}", "write the file again") from None
