"""Access to the fields of a record. A missing field, or a field of the wrong type, is refused."""

import ast
import json
import re

import numpy as np

from errors import DataError
from records import json_kind


def a_kind(value):
    kind = json_kind(value)
    return f"{'an' if kind == 'object' else 'a'} {kind}"


def parsed(value):
    """Parses a text that is the JSON of a list or an object, even if it was encoded twice; returns any other value unchanged. Writers of tables
    without JSON put Python's notation into a cell, without commas if the list was an array."""
    while isinstance(value, str) and value.lstrip()[:1] in ("[", "{", '"'):
        try:
            inner = json.loads(value)
        except (ValueError, RecursionError):
            if not re.match(r"\s*\[?\s*{\s*'", value):
                return value
            try:
                return ast.literal_eval(re.sub(r"}\n *{", "}, {", value.strip()))
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                return value
        if isinstance(inner, str) and not isinstance(parsed(inner), (list, dict)):
            return value
        value = inner
    return value


def as_json(value):
    """Returns the JSON text of a value. A table may hold values that JSON does not have."""
    def refuse(part):
        raise DataError(f"holds {a_kind(part)}, which is no text", "write it as a string, or leave it out")

    return json.dumps(value, ensure_ascii=False, default=refuse)


def has(fields, name):
    return fields.get(name) is not None


def given(fields, name):
    """Returns an optional field of a record, or None without it."""
    return fields[name] if has(fields, name) else None


def seen(fields):
    return ", ".join(f"{name} (null)" if fields.get(name) is None else name for name in fields) or "none"


def field(fields, name, flags="--input_key and --output_key"):
    if not has(fields, name):
        raise DataError(f"has no field {name!r}; it has {seen(fields)}", f"name the right one with {flags}")
    return fields[name]


def string(fields, name):
    value = field(fields, name)
    if not isinstance(value, str):
        raise DataError(f"{name!r} is {a_kind(value)}, not a string", f"write {name!r} as a string")
    return value


def integers(fields, name):
    try:
        values = np.array(field(fields, name))
    except ValueError:  # a ragged list
        values = np.array(None)
    if values.ndim != 1 or (values.size and values.dtype.kind not in "ib"):  # a mask may be boolean
        raise DataError(f"{name!r} is not a list of integers", f"write {name!r} as one flat list of integers")
    return values.astype(np.int64)


def json_field(fields, name, kind, fix):
    """Returns a field that is a list or a dict, or JSON text of one, as in a cell of CSV; empty if the record has none."""
    value = parsed(given(fields, name))
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{name!r} is broken JSON: {error}", fix) from None
    if value is None or value == "":
        return kind()
    if not isinstance(value, kind):
        raise DataError(f"{name!r} is of the kind {json_kind(value)}, not {json_kind(kind())}", fix)
    return value
