"""Files that are read or written whole or not at all; they are written by any number of processes at once."""

import contextlib
import os

from errors import DataError


def refuse_other_file(flag, path, mark):
    """Refuses to replace a file that is not an earlier result; a result has the mark in its first bytes."""
    if os.path.isfile(path) and os.path.getsize(path):
        with open(path, "rb") as file:
            if mark not in file.read(200):
                raise DataError(f"{flag} {path} exists and is not an earlier result, so it is not replaced", "give another file, or move this one away")


def refuse_disguise(path):
    """Refuses the few lines that Git leaves in place of a large file whose content it has not fetched, and compressed content without its ending."""
    with open(path, "rb") as file:
        begin = file.read(64)
    if begin.startswith(b"version https://git-lfs."):
        raise DataError(f"{path}: is a pointer of Git LFS, not the file itself", "git lfs pull in its repository, or download the file")
    if begin.startswith(b"\x1f\x8b") and not path.endswith(".gz"):
        raise DataError(f"{path}: is compressed by gzip, which its name does not say", f"mv {path} {path}.gz && gunzip {path}.gz")


@contextlib.contextmanager
def whole_file(path):
    """Opens a file for writing. If the block ends without an error, the file gets its name, and replaces an older file with this name.

    Until then the file has no name, so a killed process leaves nothing behind. On a file system without unnamed files it has a unique
    temporary name. If the path is a symbolic link, the link's target is written. A device or a pipe gets the bytes at once."""
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as file:
            yield file
        return
    path = os.path.realpath(path)
    directory = os.path.dirname(path)
    temporary = os.path.join(directory, f".{os.urandom(8).hex()}.tmp")
    try:
        descriptor = os.open(directory, os.O_TMPFILE | os.O_WRONLY, 0o666)
    except OSError:
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
            if not os.path.exists(temporary):  # src_dir_fd, which an absolute path does not need, makes os.link follow the link of /proc
                os.link(f"/proc/self/fd/{descriptor}", temporary, src_dir_fd=descriptor, follow_symlinks=True)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise
    sync_directory(directory)


def sync_directory(path):
    """Writes the directory to the disk, so that the new name survives a power cut."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
