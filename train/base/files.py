"""Armour: files that are whole or not there, and never what a link points to.

A file is written under a temporary name, NAME.tmp.PID, made durable and renamed: a reader meets
the old content or the new one, after a crash too. Folders are other people's as well: where a link
stands in place of a file of ours, the file it points to is left alone.
"""

import errno
import os
import shutil
import socket
from contextlib import contextmanager, suppress

from train.base.errors import UserError

# -----------------------------------------------------------------------------
# files

def open_new(path):
    """A new binary file for writing. What lies at `path`, of a killed process say, is removed; a
    link is, not what it points to."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    return open(path, "xb")  # exclusive: a link made since then is not followed either


def open_own(path, mode):
    """Open `path` for "ab", "a+" and so on, never through a link: OSError (ELOOP) for one."""
    if os.path.islink(path):  # for systems without O_NOFOLLOW
        raise OSError(errno.ELOOP, "is a link", path)
    return open(path, mode, buffering=0 if "b" in mode else -1, opener=lambda name, flags: os.open(
        name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666))


@contextmanager
def atomic_write(path, before=lambda temporary: None):
    """A binary file that takes the place of `path` once it is complete. before(temporary) is called
    when it is durable, under the name that it still has, right before that."""
    temporary = f"{path}.tmp.{os.getpid()}"
    try:
        with open_new(temporary) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        before(temporary)
        os.replace(temporary, path)
    finally:
        with suppress(OSError):  # there, if something failed
            os.unlink(temporary)


def write_text(path, text):
    """Replace a small file by one that holds `text`, as UTF-8."""
    with atomic_write(path) as f:
        f.write(text.encode("utf-8", "replace"))


def link(source, target):
    """Give the file `source` the name `target` too, atomically; copy where links are refused."""
    temporary = f"{target}.tmp.{os.getpid()}"
    with suppress(FileNotFoundError):  # of a process of the same number, killed
        os.unlink(temporary)
    try:
        os.link(source, temporary, follow_symlinks=True)
    except OSError:
        with open(source, "rb") as original, atomic_write(target) as copy:
            shutil.copyfileobj(original, copy)
    else:
        os.replace(temporary, target)


# -----------------------------------------------------------------------------
# what else is there

@contextmanager
def exclusive_lock(folder):
    """Context in which no other process is with `folder`, where a folder can be locked (POSIX)."""
    fd = None
    with suppress(ImportError, OSError):
        import fcntl
        fd = os.open(folder, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if fd is not None:
            os.close(fd)


def sync_folder(folder):
    """Make renames in `folder` durable, where a folder can be opened and synced (POSIX)."""
    try:
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno == errno.EIO:
            raise


def check_space(folder, needed):
    """OSError unless `needed` bytes, and a little more, are free on the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if free < needed * 1.02 + 2**20:
        raise OSError(f"it needs {needed * 1.02 / 2**20 + 1:,.1f} MiB and {free / 2**20:,.1f} MiB "
                      f"are free on the disk of {folder}")


def free_name(folder, stem, suffix=".pt"):
    """The first of STEM_1.pt, STEM_2.pt, ... in `folder` that nothing has; its path."""
    paths = (os.path.join(folder, f"{stem}_{n}{suffix}") for n in range(1, 10**6))
    return next(p for p in paths if not os.path.lexists(p))


class Lock:
    """Exclusive use of a folder while the process lives; the system frees a dead holder's lock.
    Raises UserError, naming the holder where there is one."""

    def __init__(self, folder):
        path = os.path.join(folder, ".lock")
        if os.path.islink(path):
            raise UserError(f"{path} is a link, expected a file of this program: remove the link, "
                             "or choose another --out_dir")
        self.file = open_own(path, "a+")
        try:
            import fcntl  # POSIX; without it there is no lock
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.seek(0)
            holder = self.file.read(200).strip() or "another process"
            self.file.close()
            raise UserError(f"{folder} is in use by {holder}; wait for it, stop it, or choose "
                             "another --out_dir") from None
        except (ImportError, OSError):  # or a file system without locks
            return
        self.file.truncate(0)
        self.file.write(f"pid {os.getpid()} on {socket.gethostname()}")
        self.file.flush()

    def release(self):
        self.file.close()
