"""What the Python programs share: errors of their command lines, and an exit on which all output has reached its destination."""
import argparse
import os
import sys

from errors import DataError, presentable, unexpected

LOST = "not all output reached its file or pipe\n  fix: free space there, or keep the reader open to the end"


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise DataError(message, f"{self.prog} --help")


class Watched:
    """A stream that remembers a failed write; argparse ignores such errors."""

    def __init__(self, stream):
        self.stream, self.lost = stream, False

    def write(self, text):
        try:
            return self.stream.write(text)
        except OSError:
            self.lost = True
            raise

    def __getattr__(self, name):
        return getattr(self.stream, name)


def run(main):
    """Exits with main()'s result, or with 1 and a message if not all output reached its file or pipe."""
    if sys.stdout is None:  # the caller has closed it
        sys.exit(LOST)
    sys.stdout = Watched(sys.stdout)
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    except OSError as error:
        where = error.filename or "input or output"
        code = LOST if sys.stdout.lost else presentable(f"{where}: {error.strerror}\n  fix: free space and permission to read and write")
    except Exception as error:
        code = unexpected(error)
    try:
        sys.stdout.flush()
    except OSError:
        sys.stdout.lost = True
    if sys.stdout.lost:
        code = code or LOST
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at the end
    sys.exit(code)
