"""Reads the JSON and YAML files of a user. A file that is not one, is too large or too deep, or gives a name twice, is refused with one message."""

import json
import os
import stat

from errors import DataError

BYTES = {"JSON": 1 << 26, "YAML": 1 << 18}  # of a file; YAML takes about 20 seconds per MiB
VALUES = 20_000  # of a YAML file, in which each use of an anchor counts with all its values
DEPTH = 64


def read_object(path):
    """Returns the object of a JSON file or, if its name ends so, of a YAML file."""
    kind = "YAML" if str(path).endswith((".yaml", ".yml")) else "JSON"
    return expect_object((parse_yaml if kind == "YAML" else parse_json)(read_text(path, BYTES[kind]), path), path)


def expect_object(value, where):
    if not isinstance(value, dict):
        raise DataError(f"{where} does not contain keys with values", 'write {"max_len": 4096, ...}, or in YAML max_len: 4096')
    return value


def read_text(path, most, errors="strict"):
    """Returns the text of a regular file; to open a pipe or a device could wait for ever. errors: as in bytes.decode()."""
    try:
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):
            raise DataError(f"{path} is not a regular file", "give the path of a file")
        if info.st_size > most:
            raise DataError(f"{path} has {info.st_size:,} bytes, more than the {most:,} that are read", "give another file, or leave out its unused parts")
        with open(path, "rb") as file:
            return file.read().decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read {path}: it is not UTF-8 text (byte {error.start})", "write it in UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}", "give the path of a file that you may read") from None


def once(pairs):
    """Returns the dictionary of the pairs of an object. A name given twice is refused: it has two values."""
    fields, seen = dict(pairs), set()
    if len(fields) != len(pairs):
        raise DataError(f"has {next(name for name, _ in pairs if name in seen or seen.add(name))!r} twice", "leave one of them out")
    return fields


def refuse_extremes(value, left):
    """Refuses integers beyond the range of floats, and more than `left` levels."""
    if isinstance(value, int) and value.bit_length() > 1024:
        raise DataError("has an integer of more than 1024 bits", "write a smaller one, or a text in quotes")
    if isinstance(value, (dict, list)):
        if not left:
            raise RecursionError
        for part in value.values() if isinstance(value, dict) else value:
            refuse_extremes(part, left - 1)


def parse(reader, where):
    """Returns the value that the reader returns; `where` begins all messages."""
    try:
        value = reader()
        refuse_extremes(value, DEPTH)
        return value
    except DataError as error:
        raise DataError(f"{where} {error.what}", error.fix) from None
    except RecursionError:
        raise DataError(f"{where} is nested more than {DEPTH} deep", "leave out its unused parts") from None


def not_finite(name):
    raise ValueError(f"{name} is not a number of JSON")


def parse_json(text, where):
    try:
        return parse(lambda: json.loads(text, object_pairs_hook=once, parse_constant=not_finite), where)
    except ValueError as error:
        raise DataError(f"{where} is not valid JSON: {error}", "correct it there, or write a file of settings as YAML") from None


def parse_yaml(text, where):
    try:
        import yaml
    except ImportError:
        raise DataError(f"{where} is YAML, but the Python package yaml is not installed",
                        "make deps (or: pip install pyyaml), or write it as JSON") from None

    class Loader(yaml.SafeLoader):
        def __init__(self, text):
            super().__init__(text)
            self.values, self.sizes = 0, {}  # sizes: by anchor

        def compose_node(self, parent, index):
            event, before = self.peek_event(), self.values
            node = super().compose_node(parent, index)
            is_alias = isinstance(event, yaml.AliasEvent)
            self.values += self.sizes.get(event.anchor, 1) if is_alias else 1
            if self.values > VALUES:
                raise DataError(f"has more than {VALUES:,} values, of which an alias repeats those of its anchor", "write fewer of them")
            if not is_alias:
                self.sizes[event.anchor] = self.values - before
            return node

        def compose_mapping_node(self, anchor):
            node = super().compose_mapping_node(anchor)
            once([(str(key.value), None) for key, _ in node.value])
            return node

        def construct_object(self, node, deep=False):
            try:
                return super().construct_object(node, deep)
            except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:  # 2024-99-99, or an integer of 5,000 digits
                raise yaml.MarkedYAMLError(problem=f"{error}", problem_mark=node.start_mark) from None

    try:
        return parse(lambda: yaml.load(text, Loader), where)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1} of " if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        raise DataError(f"{place}{where}: broken YAML: {problem}",
                        "indent keys of one level by the same number of spaces, write a space after each colon, and quotes around text that looks like another value") from None
