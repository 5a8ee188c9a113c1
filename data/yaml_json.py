#!/usr/bin/env python3
"""Prints a YAML file as JSON, for --config. Keys without a value, or with an empty one, are left out: they stand for defaults.

    yaml_json.py FILE.yaml"""

import json
import sys
from importlib.util import find_spec


def without_empty(value):
    if isinstance(value, dict):
        return {str(key): inner for key, inner in ((key, without_empty(inner)) for key, inner in value.items()) if inner not in (None, {}, [])}
    return [without_empty(inner) for inner in value] if isinstance(value, list) else value


def main(path):
    if find_spec("yaml") is None:
        return f"{path} is YAML, and Python has no yaml\n  fix: make deps (or: pip install pyyaml), or write it as JSON"
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            value = yaml.safe_load(file)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1} of " if mark else ""
        what = getattr(error, "problem", None) or str(error)
        return f"{where}{path}: broken YAML: {what}\n  fix: the same indentation for keys of one level, with spaces, and a space after each colon"
    print(json.dumps(without_empty(value), default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
