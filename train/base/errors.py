"""Exceptions for problems that the user can fix, and printing of untrusted text.

A UserError exits the program with `exit_code` and one message without a traceback. The message
states the problem, the place, the expected value and a remedy.
"""

import contextlib
import importlib
import re
import signal
import sys

if sys.version_info < (3, 10):  # noqa: UP036  every command imports this file
    sys.exit("Python 3.10 or newer is needed, this is " + sys.version.split()[0])


class UserError(Exception):
    """A problem that the user can fix: a command prints its message without a traceback and exits
    with `exit_code`."""
    exit_code = 2


class ConfigError(UserError, ValueError):
    """An invalid configuration. problems: a list of texts, one for each error in it."""

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
    """A UserError that all ranks raise at the same point, so that each exits by itself with its
    code (torchrun kills late ranks). Rank 0 alone prints it; nobody if exit_code is 128 or more."""
    exit_code = 1


class BadNumbers(CollectiveExit):
    """Non-finite loss, gradients or weights: training stops before it updates the model with them
    or replaces a checkpoint."""


class Stopped(CollectiveExit):
    """The run has saved a checkpoint and stops because of the signal `signum`. exit_code: 128 +
    signum."""

    def __init__(self, signum):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


def require(package, purpose, install=None):
    """Import and return the optional `package` (a module) for `purpose`, e.g. require("jinja2",
    "this chat template"). SetupError if it is missing, with the command that installs it (install:
    the name for pip, if it is different)."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        reason = "" if error.name == name else f" ({error})"
        raise SetupError(f"{purpose} needs the package {name}: pip install {install or name}"
                         f"{reason}") from None


def missing_part(error):
    """Return a message if the exception `error` is the failed import of a file of this project,
    which the user may have deleted (many files are optional); otherwise ""."""
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
    """Return `text` with control characters (except newline, also \\r\\n, and tab), bidirectional
    overrides and code points that UTF-8 or XML cannot represent escaped, as in \\x1b. For untrusted
    text, such as names of files and tensors, labels and generated text."""
    return UNPRINTABLE.sub(lambda c: c[0].encode("unicode_escape").decode(), str(text))


def echo(text, file=None):
    """Print `text`, which may contain untrusted text, with control characters escaped, to `file`
    (default: stdout), and flush."""
    print(printable(text), file=file, flush=True)


def warn_stderr(text):
    """Print `text` to stderr, control characters escaped. A closed or full stderr is ignored."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        echo(text, sys.stderr)
