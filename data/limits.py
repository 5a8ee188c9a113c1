"""Limits for chat templates. A template is a program, often by an unknown author, and could run forever or fill the memory."""

import resource
import signal

SECONDS = 10  # for one rendering; a usual one takes less than a millisecond
MEMORY = 1 << 30  # bytes that one rendering may allocate
CHARACTERS = 1 << 26  # of the rendered text; tokenising takes about 70 bytes per character


class BeyondLimit(Exception):
    """A rendering exceeded a limit; the text names the limit."""


class Limits:
    """A context that limits renderings. Only the main thread of a process can enter it, because only the main thread receives signals."""

    def __init__(self):
        self.usual = resource.getrlimit(resource.RLIMIT_AS)
        signal.signal(signal.SIGALRM, self._stop)
        self.renew()

    def renew(self):
        """Measures the process from time to time, because its memory grows with the prepared data."""
        with open("/proc/self/statm", encoding="ascii") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
        self.lowered = (limit, self.usual[1]) if self.usual[0] == resource.RLIM_INFINITY else self.usual

    def __enter__(self):
        resource.setrlimit(resource.RLIMIT_AS, self.lowered)
        signal.setitimer(signal.ITIMER_REAL, SECONDS, 1)  # again after a second, because Python drops exceptions in a destructor

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
