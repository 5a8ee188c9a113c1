"""The only error type shown to a user of the data tools, and the form of every message."""

import os
import re
import traceback

MESSAGE, LINE, HEAD = 4096, 1024, 2560  # characters
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def presentable(text):
    """Returns a message for a terminal: at most 4,096 characters, without the middle of long lines and of many lines, so that its begin and its last
    line, the fix, remain. Control characters and halves of surrogate pairs are written as \\x1b. llmc/core/common.cpp does the same."""
    lines = [short_line(UNPRINTABLE.sub(escape, line)) for line in text.split("\n")]
    if sum(map(len, lines)) + len(lines) <= MESSAGE + 1:
        return "\n".join(lines)
    begin, end = [], []
    while sum(map(len, begin)) + len(begin) + len(lines[len(begin)]) < HEAD:
        begin.append(lines[len(begin)])
    while sum(map(len, begin + end)) + len(begin + end) + len(lines[-1 - len(end)]) + 40 < MESSAGE:
        end.insert(0, lines[-1 - len(end)])
    return "\n".join([*begin, f"... ({len(lines) - len(begin) - len(end)} lines)", *end])


def escape(match):
    return match[0].encode("unicode_escape").decode()


def short_line(line):
    """Removes the middle of a line."""
    if len(line) <= LINE:
        return line
    head, tail = line[:LINE // 2], line[40 - LINE // 2:]  # 40 for the note
    return f"{head} ... ({len(line) - len(head) - len(tail):,} characters) ... {tail}"


def unexpected(error):
    """Returns the message of an error that the program has not foreseen, with its last line of code."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return presentable(f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}, line {place.lineno})\n"
                       "  fix: this is an error of the program itself; report it with the command and its input")


class DataError(Exception):
    """An error in the input: the problem with its place, and the fix."""

    def __init__(self, what, fix):
        super().__init__(what, fix)  # both as arguments, so that pickle can send the error to another process
        self.what = what
        self.fix = fix

    def __str__(self):
        return presentable(f"{self.what}\n  fix: {self.fix}")


class GeneralError(DataError):
    """An error that is not a record's, found when a record was read."""
