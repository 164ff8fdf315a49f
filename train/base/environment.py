"""Versions, host, git commit and code of this process, to describe and to compare runs."""

import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import socket
import subprocess


@functools.cache
def environment():
    """Return versions, git state, host and platform of this process as a dict, which is cached.

    "versions": {package: text} of "python" and, if installed, torch, numpy, tiktoken and pyyaml.
    "git_commit", "git_dirty": as from git_state(), at the first call. "host", "platform": texts.
    """
    versions = {package: found.version for package in ("torch", "numpy", "tiktoken", "pyyaml")
                for found in importlib.metadata.distributions(name=package)}
    versions["python"] = platform.python_version()
    commit, dirty = git_state()
    return dict(versions=versions, git_commit=commit, git_dirty=dirty, host=socket.gethostname(),
                platform=platform.platform())


def git_state():
    """Return (commit, whether files are modified or untracked), or (`None`, `None`) if unknown."""
    def git(*args):
        return subprocess.check_output(["git", "--no-optional-locks", *args], text=True, timeout=10,
                                       cwd=os.path.dirname(os.path.abspath(__file__)),
                                       stderr=subprocess.DEVNULL).strip()
    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, ValueError, subprocess.SubprocessError):  # ValueError: names not in UTF-8
        return None, None


def code_digest():
    """Return 8 hexadecimal digits that differ if a Python file in train/, model/ or data/ does."""
    code = hashlib.sha256()
    for folder in ("train", "model", "data"):
        for path in sorted(pathlib.Path(__file__).parents[2].joinpath(folder).rglob("*.py")):
            if path.is_file() and path.name[0] != ".":  # an editor's lock file is a dangling link
                code.update(path.read_bytes())
    return code.hexdigest()[:8]
