#!/usr/bin/env python3
"""Encodes texts with a model's tokenizer: encode_worker.py DIRECTORY. One request a line on standard input, one answer a line on standard output:

    {"texts": [text, ...]}     ->     {"ids": [[id, ...], ...]} or {"error": text}

Texts get the begin-of-text token if the tokenizer adds one and the text does not start with it."""

import json
import sys

from errors import DataError
from tokenizer import Tokenizer


def encode(tokenizer, texts):
    all_ids = [encoding.ids for encoding in tokenizer.encode(texts, False)]
    if tokenizer.adds_bos:
        all_ids = [ids if ids[:1] == [tokenizer.bos] else [tokenizer.bos, *ids] for ids in all_ids]
    return all_ids


def main():
    tokenizer = None
    for line in sys.stdin:
        try:
            tokenizer = tokenizer or Tokenizer(sys.argv[1])
            answer = {"ids": encode(tokenizer, json.loads(line)["texts"])}
        except DataError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
