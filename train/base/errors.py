"""Exceptions for problems that the user can fix, and printing of untrusted text.

A UserError exits the program with `exit_code` and one message without a traceback. The message
states the problem, the place, the expected value and a remedy.
"""

import contextlib
import importlib
import re
import shlex
import signal
import sys

if sys.version_info < (3, 10):  # noqa: UP036  every command imports this file
    sys.exit("Python 3.10 or newer is needed, this is " + sys.version.split()[0])


class UserError(Exception):
    """A problem that the user can fix: commands print one message and exit with `exit_code`."""
    exit_code = 2


class ConfigError(UserError, ValueError):
    """An invalid configuration; problems: a text for each error, all of which the message lists."""

    def __init__(self, problems):
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"configuration: {count}\n" + "\n".join(f"  - {p}" for p in self.problems))

    def __reduce__(self):  # sent between ranks
        return type(self), (self.problems,)


class DataError(UserError, ValueError):
    """Invalid or missing data."""


class CheckpointError(UserError, ValueError):
    """A checkpoint or run folder that cannot be used."""


class SetupError(UserError, ValueError):
    """An unmet requirement, e.g. a missing device or package, or keys that do not fit the data."""


class CollectiveExit(UserError):
    """A UserError that all ranks must raise at the same point, with the same exit_code (default 1).

    Each rank then exits by itself; torchrun kills ranks that still run when one has failed.
    Only rank 0 prints the message; no rank prints it if exit_code is 128 or more.
    """
    exit_code = 1


class BadNumbers(CollectiveExit):
    """A NaN or infinite loss, gradient, weight, optimizer state or, in a search (hpo), metric."""


class Stopped(CollectiveExit):
    """A stop by the signal `signum` (int), after saving a checkpoint; exit_code is 128 + signum."""

    def __init__(self, signum):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


def require(package, purpose, install=None):
    """Import and return an optional package, e.g. require("jinja2", "this chat template").

    purpose: for the message: PURPOSE needs the package.
    install: name for pip install, if it differs from the first part of `package`.
    Raises SetupError, with the pip command, if the import fails.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        reason = "" if error.name == name else f" ({error})"
        raise SetupError(f"{purpose} needs the package {name}: pip install {install or name}"
                         f"{reason}") from None


def missing_part(error):
    """Return a message if `error` is a failed import of a file of this project, otherwise ""."""
    name = (isinstance(error, ModuleNotFoundError) and error.name) or ""
    if name.partition(".")[0] not in ("train", "model", "data"):
        return ""
    return (f"{name.replace('.', '/')} is missing from this copy of the program: restore it, or "
            "leave out the setting that needs it")


# -----------------------------------------------------------------------------
# printing

# Control characters (except newlines and tabs), bidirectional overrides, and code points that
# UTF-8 or XML cannot represent.
UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069"
                         "\ud800-\udfff\ufffe\uffff]|\r(?!\n)")


def printable(text):
    """Return str(text) with escapes, e.g. \\x1b, in place of characters that are unsafe to print.

    These are control characters (except newline, \\r\\n and tab), bidirectional overrides and code
    points that UTF-8 or XML cannot represent. For untrusted text, e.g. names of files or tensors.
    """
    return UNPRINTABLE.sub(lambda c: c[0].encode("unicode_escape").decode(), str(text))


def echo(text, file=None):
    """Print printable(text) to the stream `file` (`None`: stdout) and flush."""
    print(printable(text), file=file, flush=True)


def quote_path(path):
    """Return `path` as one word for a shell command that users paste; -x becomes ./-x."""
    return shlex.quote(re.sub("^-", "./-", str(path)))


def warn_stderr(text):
    """Print printable(text) to stderr; never raises if stderr is closed or full."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        echo(text, sys.stderr)
