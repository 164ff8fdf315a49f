"""Train a model: python run_train.py [--config FILE.yaml] [--key value]...

Several GPUs: torchrun --nproc_per_node=8 run_train.py ... (the same run, faster).
`--help` lists every key. This file leads from the command line to train(); train/train.py trains.
"""

import os
import sys
import time

from train.base.cli import env_rank, take_flag
from train.base.errors import UserError, echo, missing_part
from train.config import (
    alias_note,
    format_config,
    format_help,
    input_files,
    load_with_origins,
    read_settings,
    take_config,
)


def show(page):
    """Print a page, also into a closed pipe (`| head`)."""
    try:
        echo(page)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def main(argv):
    """Run the command line; return the exit code."""
    started = time.monotonic()  # max_minutes includes the import of torch
    wants_help, argv = take_flag(argv, "--help", "-h")
    show_config, argv = take_flag(argv, "--print_config")
    dry_run, argv = take_flag(argv, "--dry_run")
    path, overrides = take_config(argv)
    try:
        # Nothing so far has imported torch, so --help is fast.
        if wants_help:
            return show(format_help(read_settings(path, overrides, [])[0]))
        config, origins = load_with_origins(path, overrides)
        if show_config and input_files(config):  # reading weights needs torch
            from train.checkpoint import inherited_shape
            shape, weights = inherited_shape(config)
            config, origins = config.replace(**shape), origins | dict.fromkeys(shape, weights)
        if not show_config and not dry_run:
            from data.token_files import check_files_exist
            check_files_exist(config)
    except (UserError, ModuleNotFoundError) as error:
        message = error if isinstance(error, UserError) else missing_part(error)
        if not message:
            raise
        if env_rank() == 0:  # all ranks have the same error
            echo(message, sys.stderr)
        else:
            time.sleep(3)  # torchrun kills the other ranks when one exits
        return 2
    # Only print what was requested: no file is written.
    if show_config:
        return show(format_config(config, origins))
    if (note := alias_note(origins)) and env_rank() == 0:
        echo(note)

    def job(config):
        if dry_run:
            from train.tools.dry_run import estimate
            return estimate(config)
        if config.profile:
            from train.tools.profiler import profile
            return profile(config)
        from train.train import train
        return train(config, started=started)
    from train.robust import run_reporting_errors  # torch is imported from here on
    return run_reporting_errors(config, job)


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:  # during an import
        code = 130
    sys.exit(code)
