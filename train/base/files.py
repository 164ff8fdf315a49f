"""Atomic file writes and folder locks.

A file is written under a temporary name (NAME.tmp.PID), made durable and then renamed. A reader
finds the old content or the new one, also after a crash. Symbolic links are replaced and never
followed, because in a shared folder a link could point to a file of a different user.
"""

import errno
import os
import pathlib
import shutil
import socket
from contextlib import ExitStack, contextmanager, suppress

from train.base.errors import UserError

FULL_DISK = errno.ENOSPC, errno.EDQUOT, errno.EFBIG  # also a quota, and a limit of ulimit -f

# -----------------------------------------------------------------------------
# files

def open_no_follow(path, mode):
    """Open a file like open(), unbuffered if binary; OSError (ELOOP) for a symbolic link."""
    return open(path, mode, buffering=0 if "b" in mode else -1, opener=lambda name, flags: os.open(
        name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666))


@contextmanager
def atomic_write(path, before_rename=lambda temporary: None):
    """Yield a new binary file that atomically replaces `path` when the context exits.

    before_rename(temporary): called with the path of the new, complete and durable file.
    The rename is durable only after sync_folder(). After an error, which is raised, `path` is
    unchanged and the new file deleted. An OSError without a filename, or with that of the new file,
    is given the filename `path`.
    """
    temporary = f"{path}.tmp.{os.getpid()}"
    pathlib.Path(temporary).unlink(missing_ok=True)  # left by a killed process
    try:
        with open(temporary, "xb") as f:  # exclusive: does not follow a link created since then
            yield f
            f.flush()
            os.fsync(f.fileno())
        before_rename(temporary)
        os.replace(temporary, path)
    except OSError as error:
        if error.filename in (None, temporary):  # a full disk's has none
            error.filename = path
        raise
    finally:
        with suppress(OSError):  # exists only after an error
            os.unlink(temporary)


def set_direct(file, on):
    """Set or clear O_DIRECT of an open file (writes past the page cache), where supported.

    A direct write needs aligned memory, complete disk blocks and a position at a block's start.
    """
    with suppress(ImportError, AttributeError, OSError):
        import fcntl
        flags = fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT
        fcntl.fcntl(file, fcntl.F_SETFL, flags | (os.O_DIRECT if on else 0))


@contextmanager
def reporting_full_disk(path):
    """In a context, turn OSErrors of a full disk, quota or ulimit -f into UserErrors of `path`."""
    try:
        yield
    except OSError as error:
        # numpy's error has no number: "4096 requested and 3568 written"; str() hides it if the
        # error has a filename.
        if error.errno not in FULL_DISK and "requested and" not in str(error.args):
            raise
        reason = error.strerror or "no space left on device"
        raise UserError(f"{path} could not be written: {reason}") from error


def write_text(path, text):
    """Replace the file `path` atomically with `text`, in UTF-8; surrogates become "?"."""
    with atomic_write(path) as f:
        f.write(text.encode("utf-8", "replace"))


def add_link(source, target):
    """Replace `target` atomically by a hard link to `source`, or by a copy if linking fails."""
    temporary = f"{target}.tmp.{os.getpid()}"
    pathlib.Path(temporary).unlink(missing_ok=True)  # of a killed process with the same number
    try:
        os.link(os.path.realpath(source), temporary)
    except OSError:
        with open(source, "rb") as original, atomic_write(target) as copy:
            shutil.copyfileobj(original, copy)
    else:
        try:
            os.replace(temporary, target)
        finally:
            # It exists after an error, or if both are one file.
            pathlib.Path(temporary).unlink(missing_ok=True)


# -----------------------------------------------------------------------------
# folders

@contextmanager
def exclusive_lock(folder):
    """Hold an exclusive lock (flock) on `folder` in a context, which waits until it is free.

    Not reentrant: a nested call for the same folder waits forever. No effect, and no error,
    if the system has no file locks or `folder` cannot be opened.
    """
    with ExitStack() as stack:
        with suppress(ImportError, OSError):
            import fcntl
            fd = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield


def unlock(file):
    """Release the lock of a lock_folder() file, even if forked processes have it open; close it."""
    with suppress(ImportError, OSError):
        import fcntl
        fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


def sync_folder(folder):
    """Make renames in `folder` durable (POSIX only); raise no OSError except EIO (failing disk)."""
    try:
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno == errno.EIO:
            raise


def next_free_path(folder, stem, suffix=".pt"):
    """Return the first of the paths folder/STEM_1.pt, folder/STEM_2.pt, ... that does not exist."""
    paths = (os.path.join(folder, f"{stem}_{n}{suffix}") for n in range(1, 10**6))
    return next(p for p in paths if not os.path.lexists(p))


def lock_folder(folder):
    """Lock `folder` without waiting, and return the open file folder/.lock.

    Keep a reference to this file: the lock is released by unlock(file), when the file is
    closed or garbage-collected, or at the end of the process.
    Raises UserError if the folder is already locked, also by this process (the message names
    the holder), or if the disk is full; OSError if the file cannot be opened.
    If the system or the file system has no locks, the file is returned without a lock.
    """
    file = open_no_follow(os.path.join(folder, ".lock"), "a+")
    try:
        import fcntl  # POSIX only; no lock on Windows
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink == 0:  # removed by the process that had the lock
            raise BlockingIOError
    except BlockingIOError:
        file.seek(0)
        holder = file.read(200).strip() or "another process"
        file.close()
        raise UserError(f"{folder} is in use by {holder}; wait for it, stop it, or choose another "
                        "folder (a run on several machines: torchrun --nnodes)") from None
    except (ImportError, OSError):  # the file system has no locks
        return file
    with reporting_full_disk(file.name):
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}")
        file.flush()
    return file
