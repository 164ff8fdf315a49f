"""Memory of this process and machine: how much is free, and whether malloc returns freed memory."""

import contextlib
import ctypes
import os
import pathlib


def memory_available():
    """Return the number of bytes of memory that are still free for this process: the free memory of
    the machine or, if it is less, that of the container (cgroup v2). Linux only; 2**62 if unknown.
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

    By default glibc returns large blocks, and the free end of the heap, to the system, which then
    provides memory page by page: 5 to 15% of the time of a step (train/LOG.md). Without effect for
    other C libraries, or if environment variables configure malloc.
    """
    M_TRIM_THRESHOLD = -1
    M_MMAP_MAX = -4
    if not any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        call_libc("mallopt", M_MMAP_MAX, 0)
        call_libc("mallopt", M_TRIM_THRESHOLD, -1)


def return_freed_memory():
    """Release all unused memory that malloc holds, once, to the operating system. The next step is
    slower, as it must allocate memory again. Without effect for C libraries other than glibc."""
    call_libc("malloc_trim", 0)


def call_libc(name, *args):
    """Call the function `name` of the C library. Without effect if there is no such function (other
    systems than Linux)."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        getattr(ctypes.CDLL(None), name)(*args)
