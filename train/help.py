"""Showing the configuration: --help, --print_config, config.yaml of a run, the README's table."""

import os
import sys
import textwrap
from dataclasses import asdict, fields

import yaml

from train.config import DEFAULT_PATH, base_type
from train.keys import GROUPS, TrainConfig


def help_text():
    """The --help page: every key by group, with type, default and meaning."""
    lines = ["usage: python run_train.py [--config FILE.yaml] [--key value | --key=value |",
             "                            key=value | --flag | --no-flag]...",
             "       torchrun --nproc_per_node=N run_train.py ...", "",
             f"  --config FILE         YAML file of keys (default: {DEFAULT_PATH}); `base:` in it",
             "                        names a file underneath",
             "  --print_config        print every key, its value and where it came from",
             "  --dry_run             estimate parameters, memory, tokens and time; write nothing",
             ""]
    for group, keys in GROUPS.items():
        lines.append(f"{group}:")
        for f in fields(keys):
            kind = base_type(f.type).__name__
            default = getattr(TrainConfig(), f.name)
            shown = "" if default in (None, [], {}) else f" [{_show(default)}]"
            choices = f" ({' | '.join(f.metadata['choices'])})" if "choices" in f.metadata else ""
            meaning = textwrap.wrap(f"{f.metadata['help']}{choices}{shown}", 60)
            lines.append(f"  --{f.name + ' ' + kind:<34} {meaning[0]}")
            lines += [" " * 39 + line for line in meaning[1:]]
        lines.append("")
    return "\n".join(lines)


def describe(config, origins):
    """The --print_config page: valid YAML with the origin of each value."""
    lines = []
    for group, keys in GROUPS.items():
        lines.append(f"# {group}")
        for f in fields(keys):
            text = f"{f.name}: {_show(getattr(config, f.name))}"
            lines.append(f"{text:<44} # {origins.get(f.name, 'default')}")
    return "\n".join(lines)


def _show(value):
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9).strip()
    return text.removesuffix("...").strip()


def to_yaml(config):
    """The resolved configuration as YAML text that load_config reads back to the same values."""
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)


def show(page):
    """Print, also into `| head`."""
    try:
        print(page, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def markdown_table():
    """Every key as Markdown tables by group: the README's configuration section, made by
    `python -m train.help`."""
    lines = []
    for group, keys in GROUPS.items():
        lines += [f"**{group}**", "", "| key | default | meaning |", "|---|---|---|"]
        for f in fields(keys):
            default = getattr(TrainConfig(), f.name)
            shown = "" if default in (None, [], {}) else f"`{_show(default)}`"
            choices = f" ({', '.join(f.metadata['choices'])})" if "choices" in f.metadata else ""
            lines.append(f"| `{f.name}` | {shown} | {f.metadata['help']}{choices} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown_table())
