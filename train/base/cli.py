"""Command lines: parse the options of a command, run it, report errors, return its exit code."""

import re
import sys

from train.base.errors import UsageError, UserError, echo, printable


def underscores(argv):
    """Return `argv` with --max-iters as --max_iters: option names may be written with dashes or
    underscores. Values, and everything after a bare --, are not changed."""
    end = argv.index("--") if "--" in argv else len(argv)
    return [re.sub(r"^--[^=]*", lambda m: "--" + m[0][2:].replace("-", "_"), a)
            for a in argv[:end]] + argv[end:]


def take_flag(argv, *names):
    """Return (whether one of these flags is in `argv`, `argv` without them)."""
    rest = [a for a in argv if a.replace("-", "_") not in {n.replace("-", "_") for n in names}]
    return len(rest) < len(argv), rest


def run_command(parser, work, argv=None, interrupt_message="interrupted", load=None):
    """Call work(parsed arguments) and return the exit code of the command.

    Exit codes: 0; 2 after a UserError, ValueError or OSError, which is printed in one message (a
    UsageError after the usage); 130 after Ctrl-C, with `interrupt_message`. If `load` is given,
    load(unknown arguments) is passed to `work` as its second argument (train.config.load_argv: the
    configuration of a run), and the exit code is the result of `work`.
    """
    name = parser.prog.removeprefix("python -m ")
    argv = sys.argv[1:] if argv is None else argv
    try:
        if load:
            args, rest = parser.parse_known_args(underscores(argv))
            return work(args, load(rest))
        work(parser.parse_args(underscores(argv)))
    except UsageError as error:
        parser.error(printable(error))
    except (UserError, ValueError, OSError) as error:
        echo(f"{name}: {error}", sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"{name}: {interrupt_message}", file=sys.stderr)
        return interrupt_code(stop)
    return 0


def interrupt_code(stop):
    """Return the exit code of a KeyboardInterrupt: 130 after Ctrl-C, or 128 + the signal's number
    in its arguments."""
    return 128 + (stop.args[0] if stop.args else 2)
