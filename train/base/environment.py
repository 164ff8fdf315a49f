"""Versions, host and git commit of this process, for training_args.json and trackers."""

import functools
import importlib.metadata
import os
import platform
import socket
import subprocess


@functools.cache
def environment():
    """Return a dict: versions {package: text}, git_commit and git_dirty (`None` without git), host
    and platform. Cached: later changes of files do not change the code that is imported."""
    versions = {package: found.version for package in ("torch", "numpy", "tiktoken", "pyyaml")
                for found in importlib.metadata.distributions(name=package)}
    versions["python"] = platform.python_version()
    commit, dirty = git_state()
    return dict(versions=versions, git_commit=commit, git_dirty=dirty, host=socket.gethostname(),
                platform=platform.platform())


def git_state():
    """Return (commit, whether files are modified) of the repository with this file, or (`None`,
    `None`) without git."""
    def git(*args):
        return subprocess.check_output(["git", "--no-optional-locks", *args], text=True, timeout=10,
                                       cwd=os.path.dirname(os.path.abspath(__file__)),
                                       stderr=subprocess.DEVNULL).strip()
    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return None, None
