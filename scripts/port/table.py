"""The rows of the peers' tables. A table is a list of rows; the first row that has a name, and its value where the row lists values, gives the answer:

    Same       it is our flag, or the first of several that belongs to the task, with the same values
    Sets       it stands for a flag of ours with a value
    Part       it is one of the numbers of a flag: "adam_betas 1" is the second
    Together   flags are computed from it and from other names: the module of the peer reads it by its key
    Note       it decides nothing here; the text says why
    Refused    a run must not lose its meaning, or there is no such thing here; the text says what to do instead

What Sets, Together and Refused answer is nothing where its value is false, none or null. Note and Refused hold for a name with any prefix
("ds.packing_samples"), the other answers for one within a key of NESTED ("trl.beta", but not "critic.model_name_or_path")."""

from typing import NamedTuple

NESTED = {"trl", "fsdp_config", "parallelism_config", "deepspeed_config", "special_tokens", "tokens", "lr_scheduler_kwargs", "eval", "generation_kwargs"}
OFF = {"false", "none", "null"}


class Row(NamedTuple):
    kind: str
    names: tuple
    values: tuple
    text: str
    key: str = ""
    holder: str = ""  # of a row that was found for a key within others: the name of these

    def holds_for(self, value):
        return not self.values or value.lower() in (v.lower() for v in self.values)


class Peer(NamedTuple):
    """A trainer whose command lines and files are understood."""

    name: str
    version: str
    rows: list
    defaults: object = None  # of a task: their names with their values, where they differ from ours
    task_of: object = None  # (given flags) -> the requested task and its source, or None
    complete: object = None  # (translation): computes flags from several names
    directory: str = ""  # where their output goes unless it is said
    bases: tuple = ()  # tables that hold for the peer, too

    def knows(self, name):
        return any(name in row.names for row in self.rows)


def split(names):
    return tuple(name.strip() for name in names.split(",")) if names else ()


def Same(flags, names, values=""):
    return Row("same", split(names), split(values), flags)


def Sets(flag, names, values=""):
    return Row("sets", split(names), split(values), flag)


def Part(flag, names):
    return Row("part", split(names), (), flag)


def Together(key, text, names):
    return Row("together", split(names), (), text, key)


def Note(text, names, values=""):
    return Row("note", split(names), split(values), text)


def Refused(text, names, values=""):
    return Row("refused", split(names), split(values), text)


def find(rows, name, value):
    """Returns the row for a name without dashes, with any prefix, and a value; None if there is none."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):  # "a.b.c", "b.c", "c"; then "a.b" and "b", which may be keys that hold others; then "a"
        for begin in range(end):
            part = ".".join(parts[begin:end])
            row = next((row for row in rows if part in row.names and row.holds_for(value)), None)
            if row and (row.kind in ("note", "refused") or end == len(parts) and (begin == 0 or parts[0] in NESTED)):
                return row if end == len(parts) else row._replace(holder=".".join(parts[:end]))
    return None
