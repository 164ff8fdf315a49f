"""Faults on purpose, for the tests of the tests' promises: FAULT="point@step[:rank]=action".

Honoured only in processes that pytest started. Points are named where they stand in the code;
actions: raise, exit7, kill9, sleep, nan, enospc. Several faults are separated by commas.
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
    if action == "enospc":
        raise OSError(errno.ENOSPC, "No space left on device")
    if action == "exit7":
        os._exit(7)
    if action == "kill9":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "sleep":
        time.sleep(10_000)
    return action == "nan"
