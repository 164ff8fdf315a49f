"""Train a model: python run_train.py [--config FILE.yaml] [--key value]...

Several GPUs: torchrun --nproc_per_node=8 run_train.py ... (the same run, faster).
`--help` lists every key. This file leads from the command line to train(); train/train.py trains.
"""

import os
import sys

from train.base.cli import env_rank, report_error
from train.base.errors import UserError, echo
from train.config import format_config, format_help, load_config, read_settings, take_config


def show(page):
    """Print a page, also into a closed pipe (`| head`)."""
    try:
        echo(page)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def main(argv):
    """Run the command line; return the exit code."""
    path, overrides = take_config(argv)
    try:
        # Nothing so far has imported torch, so --help is fast.
        if {"--help", "-h"} & set(overrides):
            return show(format_help(read_settings(path, overrides, [])[0]))
        config = load_config(path, overrides)
        if config.print_config:
            return show(format_config(config))
        if not config.dry_run:
            from data.token_files import check_files_exist
            check_files_exist(config)
    except (UserError, ModuleNotFoundError) as error:
        return report_error(error)
    aliases = [f"{where.rpartition(' as ')[2]} read as {name}"
               for name, where in config.origins.items() if " as " in where]
    if aliases and env_rank() == 0:
        echo(f"Note: {', '.join(aliases)}")

    def job(config):
        if config.dry_run:
            from train.tools.dry_run import estimate
            return estimate(config)
        if config.profile:
            from train.tools.profiler import profile
            return profile(config)
        from train.train import train
        return train(config)
    from train.robust import run_reporting_errors  # torch is imported from here on
    return run_reporting_errors(config, job)


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:  # during an import
        code = 130
    sys.exit(code)
