"""Limits for chat templates. A template is a program, often a stranger's, which could run for ever or fill the memory."""

import resource
import signal

SECONDS = 10  # for one rendering; the usual ones take less than a thousandth of one
MEMORY = 1 << 30  # bytes that one rendering may allocate
CHARACTERS = 1 << 26  # of the rendered text; to tokenise one takes about 70 bytes


class BeyondLimit(Exception):
    """A rendering was stopped: its words say at which limit."""


class Limits:
    """A context in which renderings are limited. Only the main thread of a process can enter it, because only that receives signals."""

    def __init__(self):
        self.usual = resource.getrlimit(resource.RLIMIT_AS)
        signal.signal(signal.SIGALRM, self._stop)
        self.renew()

    def renew(self):
        """Measures the process now and then, because its memory grows with the prepared data."""
        with open("/proc/self/statm", encoding="ascii") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
        self.lowered = (limit, self.usual[1]) if self.usual[0] == resource.RLIM_INFINITY else self.usual

    def __enter__(self):
        resource.setrlimit(resource.RLIMIT_AS, self.lowered)
        signal.setitimer(signal.ITIMER_REAL, SECONDS, 1)  # again after a second, as Python drops exceptions raised in a destructor

    def __exit__(self, kind, error, traceback):
        resource.setrlimit(resource.RLIMIT_AS, self.usual)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if kind is MemoryError:
            raise BeyondLimit(f"needs more than {MEMORY >> 20} MiB of memory") from None

    def _stop(self, *_):
        raise BeyondLimit(f"has not ended after {SECONDS} seconds")


def checked_length(text):
    if len(text) > CHARACTERS:
        raise BeyondLimit(f"makes a text of {len(text):,} characters, more than {CHARACTERS:,}")
    return text
