#!/usr/bin/env python3
"""Translates a command line. train_llama starts this script with one argument, a JSON object:

    {"program": "train_llama", "words": [...], "tasks": [...], "flags": {NAME: {"tasks": [...], "boolean": ..., "whole": ..., "wanted": ...}}, "defaults": {TASK: {NAME: VALUE}},
     "ranks": N, "converts": BOOL}

The output is a JSON object: {"task": ..., "settings": [{"name": ..., "values": [...], "where": ...}], "notes": [...], "problems": [...]}."""

import json
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from port import door  # noqa: E402  (adds data/ to sys.path)
from errors import DataError, unexpected  # noqa: E402


def main(text):
    own = json.loads(text)
    try:
        print(json.dumps(door.answer(own, own["words"])))
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    except Exception as error:
        print(unexpected(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
