"""Memory of this process and machine: how much is free, and whether malloc returns freed memory."""

import contextlib
import ctypes
import os
import pathlib


def memory_available():
    """Return the memory available to this process in bytes, or 2**62 if unknown.

    This is the machine's or, if less, the container's (cgroup v2). Linux only.
    """
    free = 2**62
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as f:
        free = next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
    with contextlib.suppress(OSError, ValueError, StopIteration):
        limit, used, stat = (pathlib.Path("/sys/fs/cgroup", f"memory.{name}").read_text()
                             for name in ("max", "current", "stat"))
        cache = next(int(line.split()[1]) for line in stat.splitlines()
                     if line.startswith("inactive_file "))
        free = min(free, int(limit) - int(used) + cache)
    return free


def memory_resident():
    """Return the resident memory of this process in bytes (Linux), or `None` if unknown."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def keep_freed_memory():
    """Configure malloc to keep the memory that a step on the CPU frees for the next step.

    By default glibc returns large blocks to the system: 5 to 15% of a step's time (train/LOG.md).
    No effect with other C libraries, or if environment variables configure malloc.
    """
    M_TRIM_THRESHOLD = -1
    M_MMAP_MAX = -4
    if not any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        call_libc("mallopt", M_MMAP_MAX, 0)
        call_libc("mallopt", M_TRIM_THRESHOLD, -1)


def return_freed_memory():
    """Return all unused memory of malloc to the system (glibc only); the next step is slower."""
    call_libc("malloc_trim", 0)


def call_libc(name, *args):
    """Call the C library's function `name`, if it exists (as on Linux)."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        getattr(ctypes.CDLL(None), name)(*args)
