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
    """A problem that the user can fix: a command prints the message without a traceback and exits
    with `exit_code` (default 2)."""
    exit_code = 2


class ConfigError(UserError, ValueError):
    """An invalid configuration. problems: a list of texts, one for each error in the configuration;
    the message lists all."""

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
    """A requirement of the run that is not met: a device, process group or package that is missing,
    or data and keys that do not fit together."""


class CollectiveExit(UserError):
    """A UserError that all ranks must raise at the same point, with the same exit_code (default 1).
    Each rank then exits with this code; torchrun would kill ranks that still run when one has
    failed. Only rank 0 prints the message; no rank prints it if exit_code is 128 or more."""
    exit_code = 1


class BadNumbers(CollectiveExit):
    """A loss, gradient, weight or metric is NaN or infinite: training stops before the model is
    updated or a checkpoint is replaced."""


class Stopped(CollectiveExit):
    """The run has received the signal `signum` (an int), has saved a checkpoint and stops.
    exit_code: 128 + signum."""

    def __init__(self, signum):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


def require(package, purpose, install=None):
    """Import and return the module `package`, an optional dependency, e.g. require("jinja2", "this
    chat template"). purpose: text for the message: PURPOSE needs the package. install: name for pip
    install, if it differs from the first part of `package`. Raises SetupError, with the command
    that installs the package, if the import fails."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        reason = "" if error.name == name else f" ({error})"
        raise SetupError(f"{purpose} needs the package {name}: pip install {install or name}"
                         f"{reason}") from None


def missing_part(error):
    """Return a message for the user if the exception `error` is a ModuleNotFoundError for a file of
    this project (train, model, data), which the user may have deleted, as many files are optional.
    Return "" for any other exception."""
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
    """Return str(text) with escapes, e.g. \\x1b, in place of control characters (except newline,
    also \\r\\n, and tab), bidirectional overrides and code points that UTF-8 or XML cannot
    represent. For untrusted text: names of files and tensors, labels, generated text."""
    return UNPRINTABLE.sub(lambda c: c[0].encode("unicode_escape").decode(), str(text))


def echo(text, file=None):
    """Print printable(text), for untrusted text, and flush. file: a text stream; `None`: stdout."""
    print(printable(text), file=file, flush=True)


def quote_path(path):
    """Return `path` as one word of a shell command, for commands that are printed: it works when
    pasted, also with special characters in it. -x becomes ./-x, which is no option."""
    return shlex.quote(re.sub("^-", "./-", str(path)))


def warn_stderr(text):
    """Print printable(text) to stderr. Never raises if stderr is closed or full."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        echo(text, sys.stderr)
