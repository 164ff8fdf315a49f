"""Faults on purpose, for the tests of what the program promises: FAULT="point@step[:rank]=action".

Honoured only in processes that pytest started. Points are named where they stand in the code.
Actions: raise, oom, exit7, kill9, sleep, nan, a signal to this process (sigterm, sigint, ...), an
error of the system (enospc, eio, ...). Several faults are separated by commas.
"""

import errno
import os
import signal
import time


def point(name, step=None):
    """Do what FAULT asks for at this point; true if the caller is to produce a NaN."""
    spec = os.environ.get("FAULT")
    if not spec or "PYTEST_CURRENT_TEST" not in os.environ:
        return False
    for fault in spec.split(","):
        where, action = fault.split("=")
        where, _, rank = where.partition(":")
        at, _, when = where.partition("@")
        here = at == name and (not when or step is None or int(when) == step)
        if here and (not rank or rank == os.environ.get("RANK", "0")):
            return _act(action, name)
    return False


def _act(action, name):
    if action == "raise":
        raise RuntimeError(f"fault at {name}")
    if action == "oom":
        raise RuntimeError(f"fault at {name}: can't allocate memory")
    if action == "exit7":
        os._exit(7)
    if action == "kill9":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "sleep":
        time.sleep(10_000)
    if action.startswith("sig"):
        os.kill(os.getpid(), getattr(signal, action.upper()))
    if hasattr(errno, action.upper()):
        number = getattr(errno, action.upper())
        raise OSError(number, os.strerror(number))
    return action == "nan"
