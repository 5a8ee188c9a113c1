"""Reads a command line and the files that it names, as settings in order of rising precedence."""

import json
import re
from pathlib import Path
from typing import NamedTuple

from errors import DataError
from json_yaml import parse_json, read_object

WHOLE = ("chat_template_kwargs", "apply_chat_template_kwargs", "deepspeed")  # objects that are one value
EMPTY = ("roles_to_train", "enable_thinking", "max_length", "clip_ratio_low", "clip_ratio_high")  # keys whose empty value is not their default
OVERRIDE = re.compile(r"[+~]*([A-Za-z_]\w*(?:\.\w+)*)=(.*)", re.S)  # a word of Hydra or OmegaConf


class PortError(DataError):
    """An error that ends the translation; its text is the message with the fix."""

    def __init__(self, text):
        super().__init__(*text.rsplit("\n  fix: ", 1))


class Setting(NamedTuple):
    name: str  # with `_`, without dashes; a nested key starts with its parents: "trl.beta"
    values: list
    where: str  # in the user's spelling: "--max-len" or "max-len in run.json"

    @property
    def value(self):
        return "true" if not self.values else self.values[0] if len(self.values) == 1 else ",".join(self.values)


def to_text(value):
    if isinstance(value, str):
        return value
    return ",".join(map(to_text, value)) if isinstance(value, list) else json.dumps(value, default=str)


def without_empty(value):
    """Removes keys with a null or empty value, if these mean the default."""
    if isinstance(value, dict):
        kept = ((key, without_empty(inner)) for key, inner in value.items())
        return {str(key): inner for key, inner in kept if inner not in (None, "None", {}, []) or key in EMPTY}
    return [without_empty(inner) for inner in value] if isinstance(value, list) else value


def read_flags(words):
    """Returns the words before the flags, and the flags as settings."""
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    bare, words, settings = words[:first], words[first:], []
    while words:
        word, equals, value = words.pop(0).partition("=")
        values = [value] if equals else []
        while not equals and words and not words[0].startswith("--"):
            values.append(words.pop(0))
        name = word[2:].replace("-", "_")
        values = ["{}" if re.fullmatch(r"\s*\{\s*\}\s*", value) else value for value in values]
        if len(values) == 1 and re.match(r"\s*\{\s*\"", values[0]) and name not in WHOLE and is_object(values[0]):
            settings += read_settings(parse_json(values[0], word), name + ".", word)  # --lr_scheduler_kwargs '{"min_lr_rate": 0.1}'
        else:
            settings.append(Setting(name, values, word))
    return bare, settings


def read_overrides(words):
    """Returns the settings of Hydra's words, NAME=VALUE, and the other words. A list is [A, B], null the default, and the names below a whole object become
    one value."""
    settings, others = {}, []
    for word in words:
        if not (found := OVERRIDE.fullmatch(word)):
            others.append(word)
            continue
        name, value = found.groups()
        listed = re.fullmatch(r"\[(.*)\]", value.strip(), re.S)
        values = [part.strip(" \t\n\"'") for part in (listed[1].split(",") if listed else [value.lower() if value in ("True", "False") else value])]
        holder, _, key = name.rpartition(".")
        if values == ["null"] and key not in EMPTY:
            settings.pop(name, None)
        elif holder.rpartition(".")[2] in WHOLE:
            inner = json.loads(settings[holder].value) if holder in settings else {}
            settings[holder] = Setting(holder, [json.dumps(inner | {key: plain_value(values[0])})], holder)
        else:
            settings[name] = Setting(name, [v for v in values if v] or values, name)
    return list(settings.values()), others


def plain_value(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


def is_object(text):
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


MOST_SETTINGS = 1000  # of a file


def read_file(path):
    settings = read_settings(without_empty(read_object(path)), "", path)
    if len(settings) > MOST_SETTINGS:
        raise DataError(f"{path} has {len(settings):,} settings, more than the {MOST_SETTINGS:,} that are read", "give a file of settings")
    return settings


def read_settings(value, prefix, where):
    settings = []
    for key, inner in value.items():
        name, place = (prefix + key).replace("-", "_"), f"{prefix}{key} {'of' if where.startswith('--') else 'in'} {where}"
        if isinstance(inner, dict) and inner and name.rpartition(".")[2] not in WHOLE:
            settings += read_settings(inner, name + ".", where)  # {"adam": {"lr": 1e-5}} is adam.lr
        elif isinstance(inner, list) and any(isinstance(entry, dict) for entry in inner):
            is_data = all(isinstance(entry, dict) and ("path" in entry or "dataset" in name) for entry in inner)
            settings += read_datasets(inner, name, place) if is_data else [Setting(name, [json.dumps(inner)], place)]
        else:
            settings.append(Setting(name, [to_text(v) for v in inner] if isinstance(inner, list) else [to_text(inner)], place))
    return settings


def read_datasets(entries, key, where):
    """Converts a list of data sets of TRL or Axolotl, [{path, name, split, ...}], to a value of --data. The other keys of an entry
    become separate settings. The path may be a file type, or a directory; then data_files names the files."""
    names, others = [], []
    for number, entry in enumerate(entries, 1):
        entry = dict(entry)
        place = where if len(entries) == 1 else f"{where} ({number})"
        path, subset, split, files = (entry.pop(name, None) for name in ("path", "name", "split", "data_files"))
        if not isinstance(path, str):
            raise PortError(f"the path of {place} is {json.dumps(path, default=str)}, not a name\n  fix: path: OWNER/NAME, or a file")
        if isinstance(files, dict):
            files = files.get(split or "train", list(files.values()))
        files = [files] if isinstance(files, str) else files or []
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
            raise PortError(f"data_files of {place} is not a file name or a list of them\n  fix: data_files: FILE, or a list of them")
        if path in ("json", "csv", "parquet", "text"):
            if not files:
                raise PortError(f'{place} has the type "{path}" but no data_files\n  fix: data_files: FILE, or path: FILE.jsonl')
            paths, split = files, None if split == "train" else split
        elif files and Path(path).is_dir():
            paths = [str(Path(path) / file) for file in files]
        else:
            paths = [path]
            if files:
                others.append(Setting("datasets.data_files", files, f"data_files of {place}"))
        names += [f"{one}{f':{to_text(subset)}' if subset else ''}{f'[{to_text(split)}]' if split else ''}" for one in paths]
        for other, value in entry.items():
            if isinstance(value, dict):  # message_property_mappings: {role: from, content: value}
                others += [Setting(f"datasets.{other}.{inner}", [to_text(text)], f"{other}.{inner} of {place}") for inner, text in value.items()]
            else:
                others.append(Setting(f"datasets.{other}", [to_text(v) for v in value] if isinstance(value, list) else [to_text(value)],
                                      f"{other} of {place}"))
    return [Setting(key, [",".join(names)], where), *others]
