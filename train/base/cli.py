"""Command lines: parse the options of a command, run it, report errors, return the exit code.

The options of a command are a dataclass of `key` fields (train/base/fields.py), with types, limits
and --help like the configuration keys of a run:

    @dataclass
    class HeadOptions:
        "Print the first lines of text files."
        files: list[str] = key([], "text files", positional=True, required=True)
        lines: int = key(10, "lines per file", ge=1)
        number: bool = key(False, "print line numbers")

    def head(options):
        ...

    main = command(HeadOptions, head)

`python -m data.head --lines 3 a.txt b.txt` calls head(HeadOptions(["a.txt", "b.txt"], 3, False)).
"""

import argparse
import contextlib
import inspect
import os
import re
import sys
import time
from dataclasses import fields
from functools import partial

from train.base.errors import UserError, missing_part, warn_stderr
from train.base.fields import base_type, describe, parse_value

EXIT_DELAY_SECONDS = 3
LOADAVG = "/proc/loadavg"
METAVARS = {int: "N", float: "X", list: "NAME"}


def underscores(argv):
    """Return `argv` with underscores for dashes in option names (not values), up to a bare --."""
    argv = list(argv)
    end = argv.index("--") if "--" in argv else len(argv)
    return [re.sub(r"^--[\w.-]+(?==|$)", lambda m: "--" + m[0][2:].replace("-", "_"), a)
            for a in argv[:end]] + argv[end:]


def add_dashes(argv, parser):
    """Return `argv` with --NAME=VALUE for NAME=VALUE where `parser` has the option --NAME.

    An argument after an option (no flag) without "=" is a value and is not changed.
    """
    flags = {name: action.nargs == 0 for action in parser._actions
             for name in action.option_strings}
    out = []
    for previous, argument in zip(["", *argv], argv):
        name, equals, _ = argument.partition("=")
        # An argument after an option without a value, other than a flag, is the value.
        is_value = previous[:2] == "--" and "=" not in previous and not flags.get(previous)
        is_setting = equals and f"--{name}" in flags and not is_value
        out.append(f"--{argument}" if is_setting else argument)
    return out


def make_parser(cls, prog, epilog=None):
    """Return an ArgumentParser for a dataclass of key() fields, described by the class docstring.

    prog: name of the command in the usage line.
    epilog: text at the end of --help, or `None`.
    Parsed values are texts or lists of texts, and `None` or [] if not given: see make_options().
    A bool option is a flag: --NAME, or --no_NAME if the default is True. A list can be repeated.
    Metadata of a field: positional, required, metavar, option (name of the option if different),
    aliases (more names, separated by spaces), nargs (of a list option).
    """
    parser = argparse.ArgumentParser(
        prog, description=inspect.getdoc(cls), epilog=epilog, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    for f in fields(cls):
        meta = f.metadata
        kind = base_type(f.type)
        usual = "PATH" if meta.get("path") else METAVARS.get(kind, "TEXT")
        how = dict(help=describe(f), metavar=meta.get("metavar", usual))
        if kind is bool:
            text = meta["help"].replace("%", "%%")
            how = dict(action="store_const", const=str(f.default is not True), help=text)
        if meta.get("positional"):
            many = "+" if meta.get("required") else "*"
            parser.add_argument(f.name, nargs=many if kind is list else None, **how)
            continue
        if kind is list:
            how |= dict(action="extend", nargs=meta.get("nargs", 1))
        name = ("no_" if f.default is True else "") + meta.get("option", f.name)
        names = [f"--{n}" for n in (name, *meta.get("aliases", "").split())]
        parser.add_argument(*names, dest=f.name, required=meta.get("required", False), **how)
    return parser


def make_options(cls, values):
    """Return an instance of the dataclass `cls` with the parsed `values` {field: text or texts}.

    Missing, `None` and [] mean the default. Raises ValueError with a line for each invalid value.
    """
    options = {}
    problems = []
    for f in fields(cls):
        if values.get(f.name) in (None, []):
            continue
        try:
            options[f.name] = parse_value(f, values[f.name])
        except ValueError as error:
            dashes = "" if f.metadata.get("positional") else "--"
            problems.append(f"{dashes}{f.metadata.get('option', f.name)}: {error}")
    if problems:
        raise ValueError("\n".join(problems))
    return cls(**options)


def command(cls, work, **how):
    """Return the main(argv=None) of a command, which calls run_command(cls, work, argv, **how).

    If the module of `cls` is the program (python -m), this runs the command and exits instead, so
    the call must be the last line of the module.
    """
    main = partial(run_command, cls, work, **how)
    if cls.__module__ == "__main__":
        sys.exit(main())
    return main


def run_command(cls, work, argv=None, interrupt_message="interrupted", load=None):
    """Parse `argv` into an instance of `cls`, call work(options) and return the exit code.

    argv: arguments; `None`: sys.argv[1:].
    interrupt_message: printed after a KeyboardInterrupt.
    load: called with the arguments that are not options of `cls`, e.g. train.config.load_argv. The
    exit code is then the result of work(options, load(arguments)).

    Exit codes: 0 for success; after a UserError, exit_code of the exception; 2 after a ValueError,
    OSError or failed import of a file of this project; 130 after Ctrl-C (128 + N after signal N).
    Errors are printed on stderr. Others are raised, and argparse's SystemExit (0: --help, else 2).
    """
    # The name of the command in messages.
    name = sys.modules[cls.__module__].__spec__.name.removesuffix(".__main__")
    epilog = "All other arguments are those of run_train.py." if load else None
    parser = make_parser(cls, f"python -m {name}", epilog)
    with contextlib.suppress(AttributeError):  # a stream of another type
        sys.stdout.reconfigure(errors="backslashreplace")  # e.g. for paths that are not UTF-8
    argv = add_dashes(underscores(sys.argv[1:] if argv is None else argv), parser)
    try:
        args, rest = parser.parse_known_args(argv) if load else (parser.parse_args(argv), [])
        options = make_options(cls, vars(args))
        if load:
            return work(options, load(rest))
        work(options)
    except (UserError, ValueError, OSError, ModuleNotFoundError) as error:
        return report_error(error, f"{name}: ")
    except KeyboardInterrupt as stop:
        print(f"{name}: {interrupt_message}", file=sys.stderr)
        return interrupt_code(stop)
    return 0


def report_error(error, prefix=""):
    """Print an error on stderr and return the exit code: error.exit_code, otherwise 2.

    Ranks other than 0 wait EXIT_DELAY_SECONDS, and print their rank in place of `prefix`. A
    ModuleNotFoundError is raised again, unless it is for a file of this project.
    """
    if isinstance(error, ModuleNotFoundError) and not missing_part(error):
        raise error
    if rank := env_rank():  # torchrun kills all ranks when one exits; rank 0 must print first
        time.sleep(EXIT_DELAY_SECONDS)
        prefix = f"[rank {rank}] "
    reason = missing_part(error) or error
    if getattr(error, "strerror", None) and error.filename is not None:
        reason = f"{error.filename}: {error.strerror}"  # as ls has it, without the number
    warn_stderr(f"{prefix}{reason}")
    return getattr(error, "exit_code", 2)


def interrupt_code(stop):
    """Return the exit code for a KeyboardInterrupt: 128 + the signal in stop.args, default 130."""
    return 128 + (stop.args[0] if stop.args else 2)


def format_table(rows):
    """Return rows of equally many strings as aligned text; columns after the first align right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join([row[0].ljust(widths[0]),
                                *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows)


def under_torchrun():
    """Return whether torchrun or a similar launcher started this process (WORLD_SIZE is set)."""
    return "WORLD_SIZE" in os.environ


def env_rank():
    """Return the rank of this process (RANK, as set by torchrun), or 0 without a valid one."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else 0  # the process group refuses other values


def limit_spinning():
    """Let idle OpenMP threads sleep early if other programs run; call before importing torch.

    Otherwise a step on the CPU may take ten times as long (train/LOG.md). Sets GOMP_SPINCOUNT,
    unless it or OMP_WAIT_POLICY is set. Linux only.
    """
    running = []  # processes and threads, with this one
    with contextlib.suppress(OSError):
        for _ in range(5):
            with open(LOADAVG) as f:
                running.append(int(f.read().split()[3].partition("/")[0]))
            time.sleep(0.01)
    if min(running, default=1) > 1 and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
