"""Load, check and print the configuration of a run. The keys are declared in train/keys.py."""

import functools
import math
import os
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass

import yaml

from train.base.errors import ConfigError
from train.base.fields import TYPES, PlainLoader, base_type, fields_by_name, nearest, parse_value
from train.keys import FIELDS, GROUP_NAMES, GROUPS, START_KEYS, TrainConfig
from train.system import REPOSITORY, load_model_type

DEFAULT_PATH = os.path.join("train", "config.yaml")
MAX_YAML_CHARS = 1 << 16
REMOVED_KEYS = ("family",)  # keys of earlier versions, which their files set to null
MAX_HINTS = 20  # problems that get a hint; the search for a similar key is slow


# -----------------------------------------------------------------------------
# keys of a model type

@functools.cache
def config_class(model="gpt"):
    """Return TrainConfig extended by the keys of the class Keys in model/NAME.py. The file is only
    imported if it is not gpt, so that plain --help does not import torch."""
    keys = None if model == "gpt" else load_model_type(model).Keys
    if keys is None:
        return TrainConfig
    keys = keys if is_dataclass(keys) else dataclass(keys)
    if duplicates := [f.name for f in fields(keys) if f.name in FIELDS]:
        raise ConfigError([f"model/{model}.py: Keys has {', '.join(duplicates)}, already keys of "
                           "every run: choose other names"])
    return dataclass(type("TrainConfig", (TrainConfig, keys), {"__doc__": TrainConfig.__doc__}))


def group_keys(cls):
    """Return {group: names of the keys in it} of a configuration class."""
    groups = {group: [f.name for f in fields(keys)] for group, keys in GROUPS.items()}
    if own := [f.name for f in fields(cls) if f.name not in FIELDS]:
        groups["Of this model"] = own
    return groups


# -----------------------------------------------------------------------------
# YAML files

def find_file(path):
    """Return `path`, or the same path inside the repository if only that one exists."""
    path = os.path.expanduser(path)
    inside = os.path.join(REPOSITORY, path)
    return inside if not os.path.exists(path) and os.path.exists(inside) else path


def read_yaml(path, problems, groups=()):
    """Return the settings [(key, raw value, "path:line")] in a YAML file, flattening the mappings
    `groups`. Problems are appended to `problems`."""
    expected = f"expected `key: value` lines, as in {DEFAULT_PATH}"
    try:
        with open(path, encoding="utf-8") as f:
            text = f.read(MAX_YAML_CHARS + 1)
        if len(text) > MAX_YAML_CHARS:
            raise yaml.YAMLError(f"more than {MAX_YAML_CHARS:,} characters")
        root = yaml.compose(text, PlainLoader)
        if isinstance(root, yaml.MappingNode):
            return read_mapping(root, path, problems, groups)
        content = f"found a {root.id} at top level" if root else "the file is empty"
        problems.append(f"{path}: {content}; {expected}")
    except FileNotFoundError:
        problems.append(f"{path}: no such file; {expected}")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{path}: cannot be read as UTF-8 text ({error})")
    except yaml.MarkedYAMLError as error:
        remedy = "indent with spaces, not tabs" if "\\t" in error.problem else expected
        problems.append(f"{path}:{error.problem_mark.line + 1}: not valid YAML: "
                        f"{error.problem}; {remedy}")
    except yaml.YAMLError as error:  # e.g. a character that YAML does not allow
        problems.append(f"{path}: not valid YAML: {error}; {expected}")
    return []


def read_mapping(root, path, problems, groups):
    """Return the settings in a YAML mapping. The mapping of a group of keys is flattened."""
    settings = []
    for key_node, value_node in root.value:
        name = str(key_node.value)
        where = f"{path}:{key_node.start_mark.line + 1}"
        if isinstance(value_node, yaml.MappingNode) and name in groups:
            settings += read_mapping(value_node, path, problems, groups)
            continue
        try:
            settings.append((name, to_python(value_node), where))
        except ValueError as error:
            problems.append(f"{where}: {name}: {error}")
    return settings


def to_python(node):
    """Convert a YAML node to str, list or dict. ValueError for a tag that would build an object."""
    if not node.tag.startswith("tag:yaml.org,2002:") or "python" in node.tag:
        raise ValueError(f"the tag {node.tag!r} is not allowed; expected a plain value")
    if isinstance(node, yaml.MappingNode):
        return {str(k.value): to_python(v) for k, v in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [to_python(v) for v in node.value]
    return node.value


def read_with_bases(path, problems, parents=()):
    """Return the settings in the YAML file at `path`, after the settings of the `base:` file (a
    path relative to this file). In a run's training_args.json, `arguments` are the settings."""
    if os.path.abspath(path) in parents:
        problems.append(f"{path}: base files form a circle")
        return []
    settings = read_yaml(path, problems, GROUP_NAMES)
    named = {name: (value, where) for name, value, where in settings}
    if "arguments" in named and isinstance(named["arguments"][0], dict):
        arguments, where = named["arguments"]
        return [(k, v, where) for k, v in arguments.items() if k not in START_KEYS]
    if "base" not in named:
        return settings
    base = os.path.join(os.path.dirname(path), os.path.expanduser(str(named["base"][0])))
    below = read_with_bases(base, problems, (*parents, os.path.abspath(path)))
    return below + [s for s in settings if s[0] != "base"]


# -----------------------------------------------------------------------------
# the command line

def take_config(argv):
    """Return (path, remaining arguments): the configuration file given as --config PATH,
    --config=PATH or a first argument FILE.yaml."""
    path = DEFAULT_PATH
    argv = list(argv)
    if argv and argv[0].endswith((".yaml", ".yml", ".json")) and "=" not in argv[0]:
        path = argv.pop(0)
    rest = []
    while argv:
        argument = argv.pop(0)
        if argument == "--config" and argv:
            path = argv.pop(0)
        elif argument.startswith("--config="):
            path = argument.partition("=")[2]
        else:
            rest.append(argument)
    return find_file(path), rest


def parse_options(argv, problems):
    """Return [(key, text or None)] of the arguments --key value, --key=value, key=value and --flag.
    A group may precede the key (model.n_layer=4)."""
    options = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        dotted, equals, text = token.lstrip("-").partition("=")
        group, _, name = dotted.replace("-", "_").rpartition(".")
        if not token.startswith("-") and not equals:
            problems.append(f"command line: {token!r}: expected --key value or key=value")
        elif group and group not in GROUP_NAMES:
            problems.append(f"command line: {token}: there is no group {group!r}; groups are "
                            f"{', '.join(sorted(GROUP_NAMES))}, and can be omitted")
        else:
            if not equals:  # the next argument is the value, unless it is an option
                is_value = tokens and not re.match(r"--?[A-Za-z]|[\w.]+=", tokens[0])
                text = tokens.pop(0) if is_value else None
            options.append((name, text))
    return options


# -----------------------------------------------------------------------------
# from settings to keys

@functools.cache
def load_aliases():
    """Return the table train/aliases.yaml: ({name in other trainers: (our key, {word: our word, or
    None if the setting has no equivalent})}, {name without an equivalent: advice})."""
    with open(os.path.join(os.path.dirname(__file__), "aliases.yaml"), encoding="utf-8") as f:
        table = yaml.load(f, PlainLoader)
    aliases = {name: (ours, {}) for ours, names in table["names"].items() for name in names.split()}
    for names, words in table["words"].items():
        target = words.pop("key"), {word: ours or None for word, ours in words.items()}
        aliases |= dict.fromkeys(names.split(), target)
    return aliases, {name: hint for names, hint in table["hints"].items() for name in names.split()}


def resolve(settings, known, problems):
    """Return {key: (raw value, where it is set)} of settings [(name, raw value, where)]. Later
    settings take precedence.

    Aliases are replaced by the keys in `known`, and " as ALIAS" is appended to `where`. On the
    command line a flag has no value (None), --no_FLAG means false, and repeated lists are
    concatenated.
    """
    resolved = {}
    kinds = {name: base_type(f.type) for name, f in known.items()}
    flags = {name for name, f in known.items()
             if kinds[name] is bool or "true" in f.metadata.get("choices", ())}
    for name, raw, where in settings:
        if name in REMOVED_KEYS and str(raw).lower() in ("none", "null"):
            continue
        alias = ""
        if name not in known and name in load_aliases()[0]:
            alias = f" as {name}"
            name, words = load_aliases()[0][name]
            is_bare_flag = raw is None and where == "command line"
            raw = "true" if raw is None and words else raw
            raw = words.get(str(raw).lower(), raw)
            if raw is None and not is_bare_flag:  # no equivalent, e.g. fp16: false
                continue
        if where == "command line" and raw is None:
            positive = name.removeprefix("no_")
            if name in flags:
                raw = "true"
            elif name not in known and positive in flags:
                name, raw = positive, "false"
            elif name in known:
                problems.append(f"command line: --{name} needs a value: {TYPES[kinds[name]][1]}")
                continue
        file = where.rpartition(":")[0]
        earlier, at = resolved.pop(name, (None, ""))  # so that the latest one comes last
        if file and at.startswith(f"{file}:"):
            problems.append(f"{where}{alias}: {name} is set twice (first at {at}); keep one")
        if where == "command line" and at.startswith(where) and kinds.get(name) is list:
            to_list = TYPES[list][0]
            raw = to_list(earlier) + to_list(raw)
        resolved[name] = raw, where + alias
    return resolved


def alias_note(origins):
    """Return a line that lists the aliases among the `origins` of values, or ""."""
    aliases = [f"{where.rpartition(' as ')[2]} read as {name}" for name, where in origins.items()
               if " as " in where]
    return f"Note: {', '.join(aliases)}" if aliases else ""


def read_settings(path, overrides, problems):
    """Return (configuration class, {key: (raw value, where it is set)}) of the file at `path` and
    `overrides`. Problems are appended to `problems`."""
    settings = [] if path is None else read_with_bases(find_file(path), problems)
    if isinstance(overrides, dict):
        settings += [(name, value, "overrides") for name, value in overrides.items()]
    else:
        options = parse_options(overrides, problems)
        for name, file in options:  # result of a search: precedes the rest of the command line
            if name == "best_config":
                best = read_with_bases(find_file(file or ""), problems)
                settings += [s for s in best if s[0] not in ("data_dir", "out_dir")]
        settings += [(name, text, "command line") for name, text in options
                     if name != "best_config"]
    model = [value for name, value, _ in settings if name == "model"]
    cls = config_class(str(model[-1]) if model else "gpt")
    return cls, resolve(settings, fields_by_name(cls), problems)


def load_config(path: str | os.PathLike | None = None,
                overrides: Iterable[str] | Mapping[str, object] = ()) -> TrainConfig:
    """Return the configuration of a run: defaults, then the file at `path` (with the base files),
    then `overrides` (command-line arguments, or a dict of Python values). ConfigError lists all
    problems."""
    return load_with_origins(path, overrides)[0]


def load_argv(argv):
    """Return the configuration that these arguments of run_train.py describe."""
    return load_config(*take_config(argv))


def load_with_origins(path=None, overrides=()):
    """Return (the configuration, {key: where the value is set}), as load_config."""
    problems = []
    cls, settings = read_settings(path, overrides, problems)
    known = fields_by_name(cls)
    values = {}
    invalid = set()
    for name, (raw, where) in settings.items():
        if name not in known:
            problems.append(f"{where}: unknown key {name!r}"
                            + advice_on(name, known, hint=len(problems) < MAX_HINTS))
            continue
        try:
            values[name] = parse_value(known[name], raw)
        except ValueError as error:
            problems.append(f"{where}: {name}: {error}")
            invalid.add(name)
    config = cls(**values)
    typed = {n for n, (_, where) in settings.items() if where.startswith("command line")}
    if "max_minutes" in typed and (other := typed & {"max_iters", "max_epochs"}):
        problems.append(f"max_minutes and {other.pop()} both set the length: give one of them")
    problems += [text for names, text in find_conflicts(config) if not invalid & names]
    if problems:
        raise ConfigError(problems)
    config.explicit = typed | {n for n, (_, where) in settings.items()
                               if where.startswith("overrides")}
    return config, {name: where for name, (_, where) in settings.items()}


def advice_on(name, known, hint=True):
    """Return the end of a message about an unknown key: the most similar key, and advice."""
    aliases, hints = load_aliases()
    names = [*known, *(alias for alias, (ours, _) in aliases.items() if ours in known)]
    return (nearest(name, names) if hint else "") + "; " + hints.get(
        name, "`python run_train.py --help` lists the keys")


def input_files(config, kinds=(True, "apart")):
    """Return {key: path} of the files that a run of `config` reads, e.g. weights to start from.
    kinds: values of the metadata `reads` of the keys."""
    paths = {f.name: getattr(config, f.name) for f in fields(config)
             if f.metadata.get("reads") in kinds}
    return {name: path for name, path in paths.items() if path not in (None, "", "scratch")}


# -----------------------------------------------------------------------------
# checks between keys

def find_conflicts(c):
    """Return [({keys}, message)] about keys of the configuration `c` that contradict each other."""
    found = c.shape_problems() if c.model == "gpt" else []
    if c.min_lr is not None and c.min_lr > c.learning_rate:
        found.append(({"min_lr", "learning_rate"},
                      f"min_lr ({c.min_lr}) must not exceed learning_rate ({c.learning_rate})"))
    world_size = os.environ.get("WORLD_SIZE", "")
    samples = c.samples_per_step
    if world_size.isdigit() and samples % max(1, int(world_size)):
        valid = [str(w) for w in range(1, samples + 1) if samples % w == 0]
        more = ", ..." if len(valid) > 12 else ""
        found.append(({"batch_size", "gradient_accumulation_steps"},
                      f"batch_size x gradient_accumulation_steps ({c.batch_size} x "
                      f"{c.gradient_accumulation_steps} = {samples} samples per step) is not "
                      f"divisible by {world_size} ranks; valid numbers of ranks: "
                      f"{', '.join(valid[:12])}{more}"))
    for name, needed in (("lr_schedule", c.lr_schedule == "plateau"), ("eval_only", c.eval_only),
                         ("early_stopping_patience", c.early_stopping_patience),
                         ("eval_tasks", c.eval_tasks)):
        if needed and not c.eval_interval and not c.eval_epochs:
            found.append(({name, "eval_interval"}, f"{name}: {getattr(c, name)} needs evaluations: "
                          "eval_interval above 0"))
    return found + [(set(), text) for text in getattr(c, "problems", list)()]


# -----------------------------------------------------------------------------
# comparing configurations

def with_defaults(values):
    """Return `values` with None replaced if the default depends on other values."""
    rules = dict(min_lr=lambda v: v["learning_rate"] / 10, n_hidden=lambda v: 4 * v["n_embd"],
                 n_kv_head=lambda v: v["n_head"],
                 head_dim=lambda v: v["n_embd"] // v["n_head"])
    return values | {n: rule(values) for n, rule in rules.items() if values.get(n, 0) is None}


def find_differences(old, new, known=FIELDS):
    """Return [(key, old value, new value)] of changed keys that affect the results of a run. `old`
    and `new` are dicts. The micro-batch may change if the global batch does not."""
    names = [n for n, f in known.items() if n in old and n in new
             and not (f.metadata.get("free") or f.metadata.get("start"))]
    changed = {n for n in names if old[n] != new[n]}
    old = with_defaults(old)
    new = with_defaults(new)
    batch = {"batch_size", "gradient_accumulation_steps"}
    if batch <= set(names) and math.prod(old[n] for n in batch) == math.prod(new[n] for n in batch):
        names = [n for n in names if n not in batch]

    def equal(a, b):
        floats = isinstance(a, float) and isinstance(b, float)
        return math.isclose(a, b, rel_tol=1e-12) if floats else a == b
    # Equal values, e.g. None twice, are no difference if only what they default to has changed.
    return [(n, old[n], new[n]) for n in names if n in changed and not equal(old[n], new[n])]


# -----------------------------------------------------------------------------
# printing

USAGE = f"""\
usage: python run_train.py [--config FILE.yaml] [--key value | --key=value |
                            key=value | --flag | --no-flag]...
       torchrun --nproc_per_node=N run_train.py ...

  --config FILE         YAML file with keys (default: {DEFAULT_PATH}); its `base:`
                        is another file, read first; or a run's training_args.json
  best_config=FILE      a second file on top, e.g. the result of a search, without
                        its data_dir and out_dir
  --print_config        print every key, its value and where it is set
  --dry_run             estimate parameters, memory, tokens and time; write nothing
  --model NAME --help   list the keys of model/NAME.py too; also --config FILE --help
"""


def format_help(cls=TrainConfig):
    """Return the --help page: every key by group, with type, default and meaning."""
    lines = [USAGE]
    known = fields_by_name(cls)
    defaults = cls()
    for group, names in group_keys(cls).items():
        lines.append(f"{group}:")
        for name in names:
            meta = known[name].metadata
            default = getattr(defaults, name)
            choices = f" ({' | '.join(meta['choices'])})" if "choices" in meta else ""
            shown = "" if default in (None, [], {}) else f" [{format_value(default)}]"
            meaning = textwrap.wrap(f"{meta.get('help', '')}{choices}{shown}", 60) or [""]
            option = f"--{name} {base_type(known[name].type).__name__}"
            lines.append(f"  {option:<36} {meaning[0]}")
            lines += [" " * 39 + line for line in meaning[1:]]
        lines.append("")
    return "\n".join(lines)


def format_config(config, origins):
    """Return the --print_config page: valid YAML with the origin of each value."""
    lines = []
    for group, names in group_keys(type(config)).items():
        lines.append(f"# {group}")
        for name in names:
            text = f"{name}: {format_value(getattr(config, name))}"
            lines.append(f"{text:<44} # {origins.get(name, 'default')}")
    return "\n".join(lines)


def format_value(value):
    """Return `value` as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9).strip()
    return text.removesuffix("...").strip()


def to_yaml(config):
    """Return the configuration as YAML from which load_config restores the same run: without the
    keys of a single start (resume, allow_change, eval_only)."""
    values = {k: v for k, v in asdict(config).items() if k not in START_KEYS}
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # the fast one, if available
    return yaml.dump(values, Dumper=dumper, sort_keys=False, allow_unicode=True)
