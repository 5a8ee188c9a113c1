"""The key of a prepared file in the trainer's cache: a hash of all that preparation reads, and of nothing else.

That are the bytes of the data and of the tokenizer's files, the options, in which a template stands as its text, the project's own code, and the
versions of the libraries that read, render and tokenise. Where a file lies does not matter; its name does, as the prepared file tells it.
Files are read whole each time: to hash them takes a small part of the time in which they were prepared, and no more than reading the result,
which the trainer checks before it begins; times and sizes would miss an edit."""

import glob
import json
import os
import sys

from xxhash import xxh3_128

from hub import is_hub_name, snapshot
from sources import hub_version, source_of, split_names, splits_of
from tokenizer import tokenizer_files
from versions import LIBRARIES, version_of

UNREAD = ("key", "out", "input", "tokenizer", "environment")  # options without an effect on the result, and options whose files are hashed or read instead


def cache_key(options):
    used = {name: value for name, value in vars(options).items() if name not in UNREAD and (name != "seed" or options.dataset_probs)}
    read = [used, [input_key(name) for name in options.input or []], tokenizer_key(options.tokenizer), code_key(), sys.version,
            {name: version_of(name) for name in LIBRARIES}]
    return xxh3_128(json.dumps(read, sort_keys=True).encode()).hexdigest()


def input_key(name):
    source = source_of(name)
    splits = splits_of(source)
    if splits is None:
        return name, hub_version(source)
    chosen = [splits[split] for split in split_names(source, splits)]
    files = [file for split in chosen for file in (split if isinstance(split, list) else files_of_saved(split))]
    return os.path.basename(name), [(os.path.basename(file), hash_of(file)) for file in files]


def files_of_saved(data):
    directories = dict.fromkeys(os.path.dirname(part["filename"]) for part in data.cache_files)
    return [path for directory in directories for path in sorted(glob.glob(f"{glob.escape(directory)}/*")) if os.path.isfile(path)]


def tokenizer_key(directory):
    if directory is None:
        return None
    if is_hub_name(directory):
        directory = snapshot(*directory.split("@"), weights=False)
    return [(os.path.relpath(path, directory), hash_of(path)) for path in tokenizer_files(directory)]


def code_key():
    """Returns the modules of preparation."""
    here = os.path.dirname(os.path.abspath(__file__))
    paths = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    return [(os.path.basename(path), hash_of(path)) for path in sorted(paths) if os.path.dirname(os.path.abspath(path)) == here]


def hash_of(path):
    total = xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while part := file.read(1 << 20):
            total.update(part)
    return total.hexdigest()
