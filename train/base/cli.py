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
METAVARS = {int: "N", float: "X", list: "NAME"}


def underscores(argv):
    """Return `argv` with --max-iters as --max_iters: option names may be written with dashes or
    underscores. Values, and everything after a bare --, are not changed."""
    argv = list(argv)
    end = argv.index("--") if "--" in argv else len(argv)
    return [re.sub(r"^--[\w.-]+(?==|$)", lambda m: "--" + m[0][2:].replace("-", "_"), a)
            for a in argv[:end]] + argv[end:]


def add_dashes(argv, parser):
    """Return `argv` with NAME=VALUE as --NAME=VALUE if `parser`, an ArgumentParser, has the option
    --NAME. An argument that is the value of the option before it is not changed."""
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
    """Return the argparse.ArgumentParser of the dataclass `cls`, whose fields are made by key().
    The docstring of `cls` is the description. The parsed values are texts or lists of texts, `None`
    if not given: make_options() converts them to the types of the fields.

    A bool option is a flag, --NAME, or --no_NAME if the default is True. A list option can be given
    several times. Metadata of a field: positional, required, metavar, option (the option's name if
    it is not the field's), aliases (more names, separated by spaces), nargs (of a list option).
    """
    parser = argparse.ArgumentParser(
        prog, description=inspect.getdoc(cls), epilog=epilog, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    for f in fields(cls):
        meta = f.metadata
        kind = base_type(f.type)
        usual = "FILE" if meta.get("path") else METAVARS.get(kind, "TEXT")
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
    """Return an instance of the dataclass `cls` from `values` {field name: text or list of texts}.
    A missing field, `None` or [] means the default. ValueError lists all invalid values."""
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
    """Return the main function of a command: main(argv=None) parses `argv` into `options`, an
    instance of the dataclass `cls`, calls work(options) and returns the exit code. how: keyword
    arguments of run_command(). If the module of `cls` runs as the program (python -m), run the
    command and exit instead; therefore the call must be the last line of the module."""
    main = partial(run_command, cls, work, **how)
    if cls.__module__ == "__main__":
        sys.exit(main())
    return main


def run_command(cls, work, argv=None, interrupt_message="interrupted", load=None, prog=None):
    """Parse `argv` (default: sys.argv[1:]) into `options`, an instance of the dataclass `cls`, call
    work(options) and return the exit code of the command.

    prog: the command's module, if `cls` is in a different module. If `load` is given, unknown
    arguments are allowed, and work(options, load(unknown arguments)) returns the exit code (load is
    e.g. train.config.load_argv: the configuration of a run).

    Exit codes: 0; after a UserError, the exit_code of the exception; 2 after a ValueError or
    OSError; 130 after Ctrl-C (128 + N after signal N), with `interrupt_message`. Each exception is
    printed as one message.
    """
    name = prog or sys.modules[cls.__module__].__spec__.name.removesuffix(".__main__")
    epilog = "All other arguments are those of run_train.py." if load else None
    parser = make_parser(cls, f"python -m {name}", epilog)
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
    """Print the message of an error that the user can fix, after `prefix`, on stderr and return the
    exit code: error.exit_code, or 2. On ranks other than 0, the prefix is the rank, and the message
    is delayed, so that rank 0 prints first. The ModuleNotFoundError of a package, which is a bug,
    is raised."""
    if isinstance(error, ModuleNotFoundError) and not missing_part(error):
        raise error
    if rank := env_rank():  # torchrun kills all ranks when one exits; rank 0 must print first
        time.sleep(EXIT_DELAY_SECONDS)
        prefix = f"[rank {rank}] "
    warn_stderr(f"{prefix}{missing_part(error) or error}")
    return getattr(error, "exit_code", 2)


def interrupt_code(stop):
    """Return the exit code for the KeyboardInterrupt `stop`: 130 after Ctrl-C, or 128 +
    stop.args[0], the number of a signal."""
    return 128 + (stop.args[0] if stop.args else 2)


def format_table(rows):
    """Return `rows`, a list of rows with equally many strings, as a text with aligned columns: the
    first column is left-aligned, the others are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join([row[0].ljust(widths[0]),
                                *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows)


def under_torchrun():
    """Return whether a launcher such as torchrun started this process (WORLD_SIZE is set)."""
    return "WORLD_SIZE" in os.environ


def env_rank():
    """Return the rank of this process, as torchrun sets it; 0 without torchrun."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else 0  # the process group refuses other values
