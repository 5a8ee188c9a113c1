"""Access to the fields of a record. A missing field, or a field of the wrong type, is refused."""

import ast
import difflib
import json
import re
from functools import lru_cache

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


# Names, in one trainer or another, of a weight or a mask of the loss, and their values in a cell of CSV.
MARK = re.compile(r"((sample|example|instance|importance|loss|token|turn|message|train)_)?weights?|loss(_scales?|_coef|_mult(iplier)?)?|"
                  r"((step_)?loss|labels?|target|train|training|prompt|completion|response|answer|assistant|token|message|turn)_masks?|masks?|"
                  r"(is_)?train(ed|able|ing)?|(train|training|loss)_(on|detail|flag)")
NUMBER = re.compile(r"true|false|[+-]?[\d.]+(e[+-]?\d+)?", re.IGNORECASE)


def snake_case(name):
    return re.sub(r"[\W_]+", "_", re.sub("(?<=[a-z])(?=[A-Z])", "_", name.strip()).lower())


@lru_cache(maxsize=None)
def is_mark(name):
    return MARK.fullmatch(snake_case(name)) is not None


def refuse_mark(name, value, fix, where=""):
    """Refuses a field that would change what is trained, but is not read here: a weight or a mask of the loss other than 1."""
    if is_number(value) and not is_one(value) and not (name == "loss" and isinstance(value, float)):
        raise DataError(f"{where}has {name!r}, a weight or a mask of the loss that is not read here", fix)


def is_number(value):
    if isinstance(value, list):
        return bool(value) and all(map(is_number, value))
    return isinstance(value, int | float) or isinstance(value, str) and NUMBER.fullmatch(value) is not None


def is_one(value):
    return all(map(is_one, value)) if isinstance(value, list) else value in (1, "1", "1.0") or str(value).lower() == "true"


@lru_cache(maxsize=None)
def misspelled(name, known):
    """Returns the known name that another name seems to be misspelled from, or has in other letters or with other separators; None for a name that is only
    similar, such as a plural."""
    plain = snake_case(name)
    if plain in known:
        return plain
    if len(plain) < 4 or plain.startswith("content") or not plain.replace("_", "").isalpha():
        return None
    like = [other for other in known if abs(len(other) - len(plain)) < 2 and plain != other + "s"]
    return next(iter(difflib.get_close_matches(plain, like, 1, 0.8)), None)


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
