"""Processes that serve the program (llmc/train/worker.h): their protocol and their end."""

import contextlib
import ctypes
import json
import os
import pathlib
import select
import signal
import sys

SET_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # of prctl


def end_with_parent():
    """This process is killed when its parent ends in any way. Called after a fork."""
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)


def serve(answer):
    """Answers every request, a JSON object in a line of standard input, by answer(request), in a line of standard output."""
    requests, answers = connect()
    for line in requests:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def connect():
    """Returns the files of requests and of answers.

    The protocol gets descriptors of its own, which other programs do not inherit. What libraries and child processes print goes to standard error,
    and their standard input is empty."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    guard(answers.fileno())
    return requests, answers


def guard(answers):
    """Goes on in a child process. This process waits until the child ends, or until nobody can read its answers any more, because the program has
    ended; then it ends the child and all processes that the child has started, even those with a session of their own."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)  # a process whose parent has ended becomes a child of this one
    guardian, worker = os.getpid(), os.fork()
    if worker == 0:
        end_with_parent()
        if os.getppid() != guardian:
            os._exit(1)
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker decides
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    readers = select.poll()
    readers.register(answers, 0)
    ended = {}
    try:
        while worker not in ended and not readers.poll(100):
            ended.update(ended_children())
    finally:
        end_children()
    os._exit(os.waitstatus_to_exitcode(ended.get(worker, 0)) & 0xff)


def ended_children():
    """Yields (process, status) of the children that have ended, so that they do not stay as zombies."""
    with contextlib.suppress(ChildProcessError):  # there are no children
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            yield child


def end_children():
    while children := [process for process in processes() if parent_of(process) == os.getpid()]:
        for process in children:
            os.kill(process, signal.SIGKILL)  # a zombie too may be sent a signal
            os.waitpid(process, 0)


def processes():
    return [int(path.name) for path in pathlib.Path("/proc").iterdir() if path.name.isdigit()]


def parent_of(process):
    try:
        return int(pathlib.Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return None
