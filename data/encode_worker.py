#!/usr/bin/env python3
"""Encodes texts with a model's tokenizer: encode_worker.py DIRECTORY. One request a line on standard input, one answer a line on standard output:

    {"texts": [text, ...]}     ->     {"ids": [[id, ...], ...]} or {"error": text}

Texts get the begin-of-text token if the tokenizer adds one and the text does not start with it."""

import sys

from errors import DataError
from tokenizer import Tokenizer
from worker import serve


def encode(tokenizer, texts):
    all_ids = [encoding.ids for encoding in tokenizer.encode(texts, False)]
    if tokenizer.adds_bos:
        all_ids = [ids if ids[:1] == [tokenizer.bos] else [tokenizer.bos, *ids] for ids in all_ids]
    return all_ids


def main():
    tokenizer = None

    def answer(request):
        nonlocal tokenizer
        try:
            tokenizer = tokenizer or Tokenizer(sys.argv[1])
            return {"ids": encode(tokenizer, request["texts"])}
        except DataError as error:
            return {"error": str(error)}

    serve(answer)


if __name__ == "__main__":
    main()
