"""The rows of the peers' tables. A table is a list of rows; the first row that has a name, and its value where the row lists values, gives the answer:

    Same       a flag of this program with the same values; of several flags, the first one that belongs to the task
    Sets       sets a flag of this program to a value
    Part       one of the numbers of a flag: "adam_betas 1" is the second one
    Together   determines flags together with other names: the peer's module reads it by its key
    Note       has no effect here; the text gives the reason
    Refused    has no equivalent here, and ignoring it would change the run; the text gives an alternative

Sets, Together and Refused do nothing for the values false and {}, unless the row lists it. Note and Refused match a name with any prefix
("ds.packing_samples"); the other rows match only prefixes in NESTED ("trl.beta", but not "critic.model_name_or_path")."""

from typing import NamedTuple

NESTED = {"trl", "fsdp_config", "parallelism_config", "deepspeed_config", "special_tokens", "tokens", "generation_kwargs"}
OFF = {"false", "{}"}
SPEED = "it concerns memory and speed, and changes no result"


class Row(NamedTuple):
    kind: str
    names: tuple
    values: tuple
    text: str
    key: str = ""
    holder: str = ""  # for a row that matched a key's parent: the parent's name

    def holds_for(self, value):
        return not self.values or value.lower() in (v.lower() for v in self.values)


class Peer(NamedTuple):
    """A trainer with supported command lines and files."""

    name: str
    version: str
    rows: list
    defaults: object = None  # (task) -> the peer's names with default values that may differ from this program's
    task_of: object = None  # (given flags) -> the requested task and its source, or None
    complete: object = None  # (translation): computes flags from several names
    directory: str = ""  # the default output directory
    bases: tuple = ()  # tables that also apply to the peer

    def only(self, names):
        """Returns the peer with these of its names, and without its bases."""
        rows = [row._replace(names=tuple(name for name in row.names if name in split(names))) for row in self.rows]
        return self._replace(rows=[row for row in rows if row.names], bases=())

    def every_row(self):
        """Returns the rows of the peer and of its bases; the peer's own come first."""
        return [*self.rows, *(row for base in self.bases for row in base.every_row())]


def split(names):
    return tuple(name.strip() for name in names.split(",")) if names else ()


def Same(flags, names, values=""):
    return Row("same", split(names), split(values), flags)


def Sets(flag, names, values=""):
    return Row("sets", split(names), split(values), flag)


def Part(flag, names):
    return Row("part", split(names), (), flag)


def Together(key, text, names, values=""):
    return Row("together", split(names), split(values), text, key)


def Note(text, names, values=""):
    return Row("note", split(names), split(values), text)


def Refused(text, names, values=""):
    return Row("refused", split(names), split(values), text)


def find(rows, name, value):
    """Returns the row for a name without dashes, with any prefix, and a value; None if there is none."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):  # "a.b.c", "b.c", "c"; then the parents "a.b" and "b"; then "a"
        for begin in range(end):
            part = ".".join(parts[begin:end])
            row = next((row for row in rows if part in row.names and row.holds_for(value)), None)
            if row and (row.kind in ("note", "refused") or end == len(parts) and (begin == 0 or parts[0] in NESTED)):
                return row if end == len(parts) else row._replace(holder=".".join(parts[:end]))
    return None
