"""Limits for chat templates. A template is a program, often by an unknown author, and could run forever or fill the memory."""

import ctypes
import resource
import signal
import time

from errors import DataError

SECONDS = 10  # of CPU time for one rendering; a usual one takes less than a millisecond
MEMORY = 1 << 30  # bytes that one rendering may allocate
CHARACTERS = 1 << 26  # of the rendered text; tokenising takes about 70 bytes per character


def beyond_limit(what, where=""):
    return DataError(f"{where}the chat template {what}", "correct it, or use another template with --tokenizer_chat_template FILE")


class Place(ctypes.Structure):
    """The record that a worker process renders, and since when (0: it does not render), in memory shared with its parent."""

    _fields_ = [("begun", ctypes.c_double), ("where", ctypes.c_char * 1000)]


class Limits:
    """A context that limits renderings in a worker process. The system ends the process at the time limit, because nothing else ends a long call in C."""

    def __init__(self):
        self.usual = resource.getrlimit(resource.RLIMIT_AS)
        self.place = Place()
        self.renew()

    def renew(self):
        """Measures the process from time to time, because its memory grows with the prepared data."""
        with open("/proc/self/statm", encoding="ascii") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
        self.lowered = (limit, self.usual[1]) if self.usual[0] == resource.RLIM_INFINITY else self.usual

    def __enter__(self):
        self.place.begun = time.monotonic()
        resource.setrlimit(resource.RLIMIT_AS, self.lowered)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF ends the process

    def __exit__(self, kind, error, traceback):
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, self.usual)
        self.place.begun = 0
        if kind is MemoryError:
            raise beyond_limit(f"needs more than {MEMORY >> 20} MiB of memory") from None


def refuse_late(places):
    """Refuses the record whose rendering has ended its process."""
    for place in places:
        if place.begun and time.monotonic() - place.begun >= SECONDS:
            raise beyond_limit(f"has not ended after {SECONDS} seconds", f"{place.where.decode(errors='ignore')}: ")


def checked_length(text):
    if len(text) > CHARACTERS:
        raise beyond_limit(f"makes a text of {len(text):,} characters, more than {CHARACTERS:,}")
    return text
