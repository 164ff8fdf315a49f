"""Atomic file writes and folder locks.

A file is written under a temporary name (NAME.tmp.PID), made durable and then renamed. A reader
finds the old content or the new one, also after a crash. Symbolic links are replaced and never
followed, because in a shared folder a link could point to a file of a different user.
"""

import errno
import os
import shutil
import socket
from contextlib import ExitStack, contextmanager, suppress

from train.base.errors import UserError

FULL_DISK = errno.ENOSPC, errno.EDQUOT, errno.EFBIG  # also a quota, and a limit of ulimit -f

# -----------------------------------------------------------------------------
# files

def open_no_follow(path, mode):
    """Open the file `path` and return the file object. mode: as for open(), e.g. "ab" or "a+". A
    binary file is unbuffered. Raises OSError (ELOOP) if `path` is a symbolic link."""
    return open(path, mode, buffering=0 if "b" in mode else -1, opener=lambda name, flags: os.open(
        name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666))


@contextmanager
def atomic_write(path, before_rename=lambda temporary: None):
    """Context manager that yields a binary file for writing. If the context exits without an error,
    this file, made durable, replaces `path` atomically. After an error `path` is unchanged, the new
    file is deleted, and the error is raised; an OSError without a filename is given the filename
    `path`.

    before_rename(temporary): called with the path of the new file, complete and durable, just
    before it is renamed to `path`.
    """
    temporary = f"{path}.tmp.{os.getpid()}"
    with suppress(FileNotFoundError):  # left by a killed process
        os.unlink(temporary)
    try:
        with open(temporary, "xb") as f:  # exclusive: does not follow a link created since then
            yield f
            f.flush()
            os.fsync(f.fileno())
        before_rename(temporary)
        os.replace(temporary, path)
    except OSError as error:
        error.filename = error.filename or path  # a full disk's has none
        raise
    finally:
        with suppress(OSError):  # exists only after an error
            os.unlink(temporary)


def set_direct(file, on):
    """Switch direct writes, past the page cache, of the open file `file` on or off. No effect where
    the system or the file system has none. A direct write needs aligned memory, whole blocks of the
    disk, and a position in the file at the start of a block."""
    with suppress(ImportError, AttributeError, OSError):
        import fcntl
        flags = fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT
        fcntl.fcntl(file, fcntl.F_SETFL, flags | (os.O_DIRECT if on else 0))


@contextmanager
def reporting_full_disk(path):
    """Context manager that turns the OSError of a full disk, a quota or a limit of ulimit -f into a
    UserError that names `path`, the file being written. Other errors are raised unchanged."""
    try:
        yield
    except OSError as error:
        # numpy's error has no number: "4096 requested and 3568 written".
        if error.errno not in FULL_DISK and "requested and" not in str(error):
            raise
        reason = error.strerror or "no space left on device"
        raise UserError(f"{path} could not be written: {reason}") from error


def write_text(path, text):
    """Replace the file `path` atomically with `text`, in UTF-8; surrogates become "?"."""
    with atomic_write(path) as f:
        f.write(text.encode("utf-8", "replace"))


def add_link(source, target):
    """Make the path `target` a hard link to the file `source`, atomically; an existing file
    `target` is replaced. If the file system has no hard links, `target` becomes a copy."""
    temporary = f"{target}.tmp.{os.getpid()}"
    with suppress(FileNotFoundError):  # left by a killed process with the same number
        os.unlink(temporary)
    try:
        os.link(source, temporary, follow_symlinks=True)
    except OSError:
        with open(source, "rb") as original, atomic_write(target) as copy:
            shutil.copyfileobj(original, copy)
    else:
        try:
            os.replace(temporary, target)
        finally:
            with suppress(FileNotFoundError):  # exists after an error, or if both are one file
                os.unlink(temporary)


# -----------------------------------------------------------------------------
# folders

@contextmanager
def exclusive_lock(folder):
    """Context manager that holds an exclusive lock (flock) on `folder`. On entry it waits until the
    lock is free. Not reentrant: a nested call for the same folder waits forever. Without effect if
    the system or the file system has no locks."""
    with ExitStack() as stack:
        with suppress(ImportError, OSError):
            import fcntl
            fd = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield


def unlock(file):
    """Release the lock of lock_folder(), which returned `file`, and close the file. Without this,
    processes that were forked since then would keep the lock."""
    with suppress(ImportError, OSError):
        import fcntl
        fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


def sync_folder(folder):
    """Make earlier renames of files in `folder` durable, by fsync of the folder (POSIX; without
    effect on Windows). Raises OSError only for a failing disk (EIO)."""
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
    """Return the first of the paths folder/STEM_1.pt, folder/STEM_2.pt, ... (str) that does not
    exist. suffix: in place of ".pt", e.g. "" for a folder. Creates nothing."""
    paths = (os.path.join(folder, f"{stem}_{n}{suffix}") for n in range(1, 10**6))
    return next(p for p in paths if not os.path.lexists(p))


def lock_folder(folder):
    """Lock `folder` without waiting, and return the open file folder/.lock. Keep this file: the
    lock is released by unlock(file), when the file is closed or garbage-collected, or at the end of
    the process. Raises UserError if the folder is already locked, also by this process; the message
    names the process that holds the lock. Raises UserError for a full disk, OSError if the file
    cannot be opened. If the system or the file system has no locks, the file is returned without a
    lock."""
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
