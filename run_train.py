"""Train a model: python run_train.py [--config FILE.yaml] [--key value]...

Several GPUs: torchrun --nproc_per_node=8 run_train.py ... (the same run, faster).
`--help` lists every key. This file leads from the command line to train(); train/train.py trains.
"""

import os
import signal
import sys

from train import config
from train.base.cli import env_rank, limit_spinning, report_error
from train.base.errors import UserError, echo


def main(argv):
    """Train, or print the help, the configuration or the estimate of a dry run, as `argv` requests.

    argv: arguments, without the program's name. Returns the exit code: 0; 1 after a crash, for
    non-finite numbers or a failed last save; 2 for invalid input; 128 + n after signal n. Under
    torchrun, a run exits the process with the code instead.
    """
    try:
        # Nothing so far has imported torch, so --help is fast.
        options = [a for a in argv if a not in ("--help", "-h")]
        if len(options) < len(argv):
            keys, _ = config.read_settings(config.DEFAULT_PATH, options, [])
            echo(config.format_help(keys))
            return 0
        c = config.load_argv(argv)
        if c.print_config:
            echo(config.format_config(c))
            return 0
    except (UserError, ModuleNotFoundError) as error:
        return report_error(error)
    for line in config.describe_aliases(c) if env_rank() == 0 else ():
        echo(line)

    def job(c):
        if c.dry_run:
            from train.tools.dry_run import estimate as work
        elif c.profile:
            from train.tools.profiler import profile as work
        else:
            from train.train import train as work
        return work(c)
    from train.robust import run_reporting_errors  # torch is imported from here on
    return run_reporting_errors(c, job, prints=c.dry_run)


if __name__ == "__main__":
    limit_spinning()
    if hasattr(signal, "SIGUSR1"):  # "save": before the training loop there is nothing to save
        signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:  # during an import
        code = 130
    except BrokenPipeError:  # e.g. --help | head
        os._exit(0)
    except OSError as error:  # e.g. --help > FILE on a full disk
        code = report_error(error, "run_train.py: ")
    sys.exit(code)
