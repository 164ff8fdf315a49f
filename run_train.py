"""Train a model: python run_train.py [--config FILE.yaml] [--key value]...

Several GPUs: torchrun --nproc_per_node=8 run_train.py ... (the same run, faster).
`--help` lists every key. This file leads from the command line to train(); train/train.py trains.
"""

import os
import sys
import time

from train.config import DEFAULT_PATH, ConfigError, load_with_origins
from train.help import describe, help_text, show


def take_flag(argv, *names):
    """Whether one of the flags is in argv, and argv without them."""
    rest = [a for a in argv if a.replace("-", "_") not in {n.replace("-", "_") for n in names}]
    return len(rest) < len(argv), rest


def take_config(argv):
    """The path given as --config PATH, --config=PATH or a first argument FILE.yaml; the rest."""
    path, rest, argv = DEFAULT_PATH, [], list(argv)
    if argv and argv[0].endswith((".yaml", ".yml")) and "=" not in argv[0]:
        path = argv.pop(0)
    while argv:
        a = argv.pop(0)
        if a == "--config" and argv:
            path = argv.pop(0)
        elif a.startswith("--config="):
            path = a.partition("=")[2]
        else:
            rest.append(a)
    return path, rest


def main(argv):
    """Run the command line; the exit code."""
    wants_help, argv = take_flag(argv, "--help", "-h")
    show_config, argv = take_flag(argv, "--print_config")
    dry_run, argv = take_flag(argv, "--dry_run")
    if wants_help:
        return show(help_text())
    path, overrides = take_config(argv)
    try:
        config, origins = load_with_origins(path, overrides)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":  # every rank finds the same: one speaks
            print(error, file=sys.stderr)
        else:
            time.sleep(3)  # torchrun ends the others as soon as one has gone
        return 2
    if show_config:
        return show(describe(config, origins))
    from train.report import run_reporting_errors  # torch is imported from here on
    return run_reporting_errors(config, dry_run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
