"""Load, check and print the configuration of a run. The keys are declared in train/base/keys.py."""

import argparse
import functools
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path

import yaml

from train.base import fields as key_fields
from train.base.errors import ConfigError, SetupError
from train.base.keys import FIELDS, GROUP_NAMES, GROUPS, START_KEYS, TrainConfig
from train.system import REPOSITORY, load_model_type

DEFAULT_PATH = os.path.join("train", "config.yaml")
MAX_EPOCHS_IN_STEPS = 200  # more need a length in epochs (max_epochs)


# -----------------------------------------------------------------------------
# keys of a model type

def config_class(model="gpt"):
    """Return the configuration class of a model type: TrainConfig, or a subclass with more keys.

    For gpt no file is imported, so that plain --help does not import torch. Raises ConfigError if
    there is no such model type, or if the class Keys in model/NAME.py repeats a key of TrainConfig.
    """
    keys = None if model == "gpt" else load_model_type(model).Keys
    return TrainConfig if keys is None else join_keys(keys, model)


@functools.cache  # by the class: importlib.reload() of the file makes another one
def join_keys(keys, model):
    """Return TrainConfig with the keys of a model's class Keys; ConfigError if it repeats a key."""
    keys = keys if is_dataclass(keys) else dataclass(keys)
    if duplicates := [f.name for f in fields(keys) if f.name in FIELDS]:
        raise ConfigError([f"model/{model}.py: Keys has {', '.join(duplicates)}, already keys of "
                           "every run: choose other names"])

    return dataclass(type("TrainConfig", (TrainConfig, keys), {"__doc__": TrainConfig.__doc__}))


def group_fields(cls):
    """Return {heading: dataclass fields} of a configuration class, in the order of --help."""
    own = [f for f in fields(cls) if f.name not in FIELDS]
    groups = {group: fields(keys) for group, keys in GROUPS.items()}
    return groups | {"Of this model": own} if own else groups


# -----------------------------------------------------------------------------
# YAML files

def find_file(path):
    """Return `path`, ~ expanded, or the same path in the repository if only that file exists."""
    path = os.path.expanduser(path)
    inside = os.path.join(REPOSITORY, path)
    return inside if not os.path.exists(path) and os.path.exists(inside) else path


def read_yaml(path, problems, groups=()):
    """Return the settings in a YAML file, [(key, raw value, "path:line")].

    groups: names of mappings that only group keys: with "training", `training: {lr: 1}` sets lr.
    Raw values are strings, or lists and dicts of strings. Messages about an unreadable or invalid
    file are appended to `problems`; nothing is raised.
    """
    settings = []

    def add(mapping, group=""):
        for key, value in mapping.value:
            name = str(key.value)
            if isinstance(value, yaml.MappingNode) and name in groups:
                add(value, f"{group}{name}.")
            else:
                raw = loader.construct_object(value, deep=True)
                where = f"{path}:{key.start_mark.line + 1}"
                settings.append((remove_groups(group + name), raw, where))
    try:
        with open(path, encoding="utf-8") as f:
            loader = yaml.BaseLoader(f.read())  # only texts: 1e-4, no
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise yaml.YAMLError(f"a {root.id} at top level" if root else "the file is empty")
        add(root)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        problems.append(f"{path}: cannot be read: {reason}; expected a YAML file")
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        problems.append(f"{path}{f':{mark.line + 1}' if mark else ''}: not valid YAML: "
                        f"{getattr(error, 'problem', error)}; expected `key: value` lines without "
                        f"tabs, as in {DEFAULT_PATH}")
    return settings


def read_with_bases(path, problems, parents=()):
    """Return the settings in a YAML file, as read_yaml() does, after those in the files of `base`.

    parents: absolute paths of the files that led here by `base`, to detect a circle.
    The key `base` is a path relative to this file, and may occur several times. In a run's
    training_args.json, the settings are the entries of `arguments` except START_KEYS. Messages are
    appended to `problems`; nothing is raised.
    """
    if os.path.abspath(path) in parents:
        problems.append(f"{path}: base files form a circle")
        return []
    below = []
    settings = read_yaml(path, problems, GROUP_NAMES)
    for name, value, where in settings:
        if name == "arguments" and isinstance(value, dict):
            return [(k, v, where) for k, v in value.items() if k not in START_KEYS]
        if name == "base":
            base = os.path.join(os.path.dirname(path), os.path.expanduser(str(value)))
            below += read_with_bases(base, problems, (*parents, os.path.abspath(path)))
    return below + [s for s in settings if s[0] != "base"]


# -----------------------------------------------------------------------------
# the command line

def parse_options(argv, problems):
    """Return the settings in command-line arguments, [(key, raw value, "command line")].

    --key value, --key=value and key=value give a string, --flag gives True, and --no-flag gives
    False for the key flag. A group may precede the key (model.n_layer=4), and dashes in names
    become underscores. Messages about invalid arguments are appended to `problems`.
    """
    settings = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        dotted, equals, value = token.partition("=")
        if not token.startswith("-") and not equals:
            hint = f"; did you mean --config {token}?" if token.endswith((".yaml", ".yml")) else ""
            problems.append(f"command line: {token!r}: expected --key value or key=value{hint}")
            continue
        name = remove_groups(dotted.lstrip("-").replace("-", "_"))
        if not equals:  # the next argument is the value, unless it is an option
            if tokens and not re.match(r"--?[A-Za-z]|[\w.]+=", tokens[0]):
                value = tokens.pop(0)
            else:
                value = not name.startswith("no_")
                name = name.removeprefix("no_")
        settings.append((name, value, "command line"))
    return settings


# -----------------------------------------------------------------------------
# from settings to keys

class Aliases:
    """Tables of train/aliases.yaml that translate names and values of other trainers.

    The attributes, read when the first one is needed, are
    names: {name: key; or a list of keys, of which the first one that the model has is meant; or a
    template for fill()}
    words: {name: {word: value, or {key: value}}}, values with a different name here
    switches: [name], names that only switch something on or off
    per_epoch: {name: key}, used in place of `names` if the run's length is in epochs
    models: {key: model type that has the key}, for error messages
    hints: {name: why there is no such key}, for messages
    A key or value "ignored" means that the setting is accepted without effect.
    """

    def __getattr__(self, name):
        with open(os.path.join(os.path.dirname(__file__), "aliases.yaml"), encoding="utf-8") as f:
            loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # in C: 4 ms instead of 30
            vars(self).update(yaml.load(f, loader))
        return vars(self)[name]


ALIASES = Aliases()
NULL = ("null", "none", "~")
# {key: the lengths, in epochs or as a fraction, of an earlier file that it replaces}
REPLACED_LENGTHS = dict(max_iters=["max_epochs"], eval_interval=["eval_epochs"],
                        warmup_iters=["warmup_epochs", "warmup_ratio"],
                        warmup_epochs=["warmup_ratio"], warmup_ratio=["warmup_epochs"])
IGNORED = object()  # value of a setting without effect, which the console reports


def remove_groups(dotted):
    """Return a setting's name without the groups before it: "lr" for "training.lr".

    The last group remains if "GROUP.NAME" has a meaning in train/aliases.yaml (optimizer.name). If
    a group is not in GROUP_NAMES, `dotted` is returned unchanged.
    """
    *groups, name = dotted.split(".")
    if not groups or not GROUP_NAMES.issuperset(groups):
        return dotted
    own = f"{groups[-1]}.{name}"
    return own if own in ALIASES.names or own in ALIASES.hints else name


def translate(name, raw, known, by_epochs=False):
    """Return {key: raw value}, the setting `name` translated by train/aliases.yaml.

    known: {key: dataclass field} of the configuration class.
    by_epochs: whether the run's length is in epochs; save_every then means save_epochs, eval_every
    eval_epochs.
    The result may have several keys. It is {name: raw} if there is no translation, or if `name` is
    a key that accepts `raw`; {} if there is no effect, e.g. "null" for a name that is no key.
    """
    target = name if name in known else ALIASES.names.get(name, name)
    if name in known and raw not in NULL:
        choices = known[name].metadata.get("choices", [raw])
        if raw in choices or not isinstance(raw, (str, bool)):
            return {name: raw}
    if by_epochs and name in ALIASES.per_epoch:
        target = ALIASES.per_epoch[name]
    if isinstance(target, list):
        target = next((key for key in target if key in known), target[-1])
    if isinstance(target, dict):
        return fill(target, raw)
    text = str(raw).strip().lower()
    text = str(key_fields.BOOLS.get(text, text)).lower()  # yes: true
    words = ALIASES.words
    word = words.get(name, {}).get(text) or words.get(target, {}).get(text)
    if isinstance(word, dict):
        return {k: v for n, value in word.items() for k, v in translate(n, value, known).items()}
    field = known.get(target)
    takes_none = field and ("None" in str(field.type) or text in field.metadata.get("choices", ()))
    if text in NULL and not (word or takes_none or name in known):  # not set
        return {}
    return {} if "ignored" in (target, word) else {target: word or raw}


def fill(template, raw):
    """Return `template`, a value in train/aliases.yaml, with the value `raw` of a setting inserted.

    "$" becomes `raw`; "$1" and "$2" become the first and second item of `raw`, e.g. of "0.9, 0.95",
    or the list of all items if there are not two. In a dict, each value is replaced.
    """
    if isinstance(template, dict):
        return {name: fill(value, raw) for name, value in template.items()}
    items = re.findall(r"[\w.+-]+", str(raw)) if template != "$" else []
    return items[int(template[1:]) - 1] if len(items) == 2 else items or raw


def resolve(settings, known, problems):
    """Return {key: (raw value, where)} of settings translated to keys; later settings win.

    settings: [(name, raw value, where)]; where: "path:line", "command line" or "overrides".
    known: {key: dataclass field}. Aliases become keys in it, with " as ALIAS" appended to `where`.
    problems: gets a message if one file sets a key twice, or the command line a list or dict twice.
    Dicts that different aliases give for one key are joined. An alias without effect remains, with
    the value IGNORED, if there is a hint about it. Unknown names remain. A length, e.g. max_iters,
    removes those in other units (max_epochs) that an earlier file sets: see REPLACED_LENGTHS.
    """
    resolved = {}
    lengths = {"max_epochs", "epochs", "num_epochs", "num_train_epochs"}
    by_epochs = lengths & {n for n, raw, _ in settings if str(raw).lower() not in ("", *NULL)}
    for name, raw, where in order_switches(settings, known):
        file = file_of(where)
        translated = translate(name, raw, known, by_epochs)
        if not translated and name in ALIASES.hints and str(raw).lower() not in NULL:
            resolved[name] = IGNORED, where
        for key, value in translated.items():
            old, first = resolved.pop(key, (None, ""))  # so that the latest one comes last
            earlier = first.rpartition(":")[2].partition(" as ")[2]  # after FILE:LINE
            alias = "" if {key: value} == {name: raw} else name
            if alias and isinstance(value, dict) and isinstance(old, dict):
                value = old | value  # e.g. memory_lr and lora_lr, both for lr_groups
                alias = f"{earlier}, {name}" if earlier else name
            elif first and file_of(first) == file:
                is_list = key in known and key_fields.base_type(known[key].type) in (list, dict)
                # Of other arguments, the last one counts.
                if (file or is_list) and not {earlier, name} & {*ALIASES.switches}:
                    how = "" if file else ", as [VALUE, VALUE] or {NAME: VALUE, NAME: VALUE}"
                    problems.append(
                        f"{where}: {key} is set twice (first at {first}); keep one{how}")
            for other in REPLACED_LENGTHS.get(key, ()):
                if other in resolved and file_of(resolved[other][1]) != file:
                    del resolved[other]
            resolved[key] = value, f"{where} as {alias}" if alias else where
    return resolved


def order_switches(settings, known):
    """Return `settings`, as for resolve(), with switches (e.g. amp) in order of precedence.

    In each file, a switch that is on comes first, so that other settings override it, and one that
    is off (or "hybrid") comes last, so that it overrides them.
    """
    files = {file_of(where): i for i, (_, _, where) in enumerate(settings)}

    def place(setting):
        name, raw, where = setting
        if name in known or name not in ALIASES.switches:
            return files[file_of(where)], 0
        is_off = str(raw).lower() in ("false", "no", "off", "hybrid", "hybrid_shard")
        return files[file_of(where)], 1 if is_off else -1
    return sorted(settings, key=place)


def file_of(where):
    """Return the path in "path:line" or "path:line as ALIAS"; "" for other values of `where`."""
    return where.rpartition(":")[0]


def read_settings(path, overrides, problems):
    """Return (configuration class, {key: (raw value, where it is set)}), with raw values unparsed.

    path: of a YAML file; `None`: no file.
    overrides: command-line arguments or a dict, which take precedence. The key `config` in it
    replaces `path`; `best_config` names a search result that is read in between, without base,
    data_dir and out_dir.
    Messages are appended to `problems`. Raises ConfigError for an unknown model type.
    """
    options = ([(name, value, "overrides") for name, value in overrides.items()]
               if isinstance(overrides, Mapping) else parse_options(overrides, problems))
    given = {name: value for name, value, _ in options}
    for name in ("config", "best_config"):
        if given.get(name) is True:
            problems.append(f"command line: --{name}: expected a file")
            del given[name]
    path = given.get("config", path)
    settings = read_with_bases(find_file(str(path)), problems) if path is not None else []
    if given.get("best_config") is not None:  # what a search changed, without its `base`
        best = read_yaml(find_file(str(given["best_config"])), problems, GROUP_NAMES)
        settings += [s for s in best if s[0] not in ("base", "data_dir", "out_dir")]
    settings += [option for option in options if option[0] not in ("config", "best_config")]
    models = ["gpt", *(str(value) for name, value, _ in settings if name == "model")]
    cls = config_class(models[-1])
    return cls, resolve(settings, key_fields.fields_by_name(cls), problems)


def load_config(path: str | os.PathLike | None = None,
                overrides: Iterable[str] | Mapping[str, object] = ()) -> TrainConfig:
    """Return the checked TrainConfig of a YAML file and `overrides`, which take precedence.

    path: of the file, read with base files (key `base`); `None`: no file.
    overrides: command-line arguments or {key: Python value}; --config FILE replaces `path`.
    With max_epochs, eval_epochs is 1 by default. The result's attribute `origins` is {key that is
    set, or ignored alias: where it is set}. Raises ConfigError, which lists all problems.
    """
    problems = []
    cls, settings = read_settings(path, overrides, problems)
    known = key_fields.fields_by_name(cls)
    values = {}
    for name, (raw, where) in settings.items():
        if name not in known:
            if raw is not IGNORED:
                problems.append(f"{where}: {describe_unknown(name, known)}")
            continue
        try:
            values[name] = key_fields.parse_value(known[name], raw)
        except ValueError as error:
            problems.append(f"{where}: {name}: {error}")
    if values.get("max_epochs") and not {"eval_interval", "eval_epochs"} & settings.keys():
        values["eval_epochs"] = 1.0  # a length in epochs: evaluate after each
    config = cls(**values)
    # Conflicts of keys with invalid values are left out: they follow from these values.
    invalid = settings.keys() & known.keys() - values.keys()
    problems += [text for text in find_conflicts(config)
                 if not invalid.intersection(re.findall(r"\w+", text))]
    if problems:
        raise ConfigError(problems)
    config.origins = {name: where for name, (_, where) in settings.items()}
    return config


def describe_unknown(name, known):
    """Return an error message, with a suggestion, about a setting that is no key in `known`."""
    if name in ALIASES.hints:
        return f"unknown key {name!r}; {ALIASES.hints[name]}"
    if name in ALIASES.models:
        return f"unknown key {name!r}; it is a key of --model {ALIASES.models[name]}"
    similar = key_fields.nearest(name, [*known, *ALIASES.names])
    return f"unknown key {name!r}{similar}; `python run_train.py --help` lists the keys"


def load_argv(argv):
    """Return load_config() of the arguments `argv`; without --config, of train/config.yaml."""
    return load_config(DEFAULT_PATH, argv)


def input_files(config, kinds=(True, "apart")):
    """Return {key: value} of the keys, if set, that name files or weights to read, except the data.

    kinds: which keys, by `reads` in the field's metadata: True for weights with which the run
    starts and from which it takes the model's architecture, "apart" for other files (weights of any
    architecture, GRPO's reward file).
    A value may be a file, a folder, hf:OWNER/NAME or, for `teacher`, "A,B".
    """
    paths = {f.name: getattr(config, f.name) for f in fields(config)
             if f.metadata.get("reads") in kinds}
    # Values that name no file: init_from `scratch`, GRPO's reward `exact`.
    return {name: path for name, path in paths.items()
            if path not in (None, "", "scratch", "exact")}


def split_paths(text):
    """Return the paths in "A,B", a value of the key teacher, stripped and with ~ expanded."""
    return [os.path.expanduser(path.strip()) for path in text.split(",")]


def keys_of_moved_files(config):
    """Return ["--KEY VALUE"] of the keys with files in out_dir, which `--resume never` moves."""
    folders = {os.path.abspath(os.path.join(config.out_dir, name)) for name in ("", "shards")}
    return [f"--{name} {paths}" for name, paths in input_files(config).items()
            for path in map(os.path.abspath, split_paths(paths))
            if path in folders or os.path.dirname(path) in folders]


def describe_files(config):
    """Return a text that changes with the files, except data, that a run reads: sizes and times."""
    files = split_paths(",".join([*input_files(config).values(), *config.eval_tasks]))
    paths = [path for file in files if file
             for path in (Path(file), *sorted(Path(file).glob("*"))) if path.exists()]
    return "".join(f" {state.st_size} {state.st_mtime_ns}" for state in map(Path.stat, paths))


# -----------------------------------------------------------------------------
# checks between keys

def find_conflicts(c):
    """Return messages about conflicting keys; ranks: c.world_size, else the variable WORLD_SIZE."""
    found = c.shape_problems() if c.model == "gpt" else []
    if c.min_lr is not None and c.min_lr > c.learning_rate:
        found.append(f"min_lr ({c.min_lr}) must not exceed learning_rate ({c.learning_rate})")
    if None not in (c.warmup_ratio, c.warmup_epochs):
        found.append("warmup_ratio does not go with warmup_epochs; leave one out")
    if c.deterministic and c.cudnn_benchmark:
        found.append("deterministic: true does not go with cudnn_benchmark: true; leave one out")
    if c.eval_only and c.resume == "never":
        found.append("eval_only does not go with resume: never; leave one out")
    if not c.out_dir or "://" in c.out_dir:
        found.append(f"out_dir: expected a folder, got {c.out_dir!r}; to copy the checkpoints to a "
                     "URL: --mirror URL")
    if c.world_size and c.world_size % c.nodes:
        found.append(f"world_size: {c.world_size} GPUs cannot be divided among {c.nodes} nodes")
    given = os.environ.get("WORLD_SIZE", "")
    world_size = c.world_size or (int(given) if given.isdigit() else 0)  # 0: unknown
    samples = c.samples_per_step
    if world_size and samples % world_size:
        found.append(f"batch_size x gradient_accumulation_steps ({c.batch_size} x "
                     f"{c.gradient_accumulation_steps} = {samples} samples per step) is not "
                     f"divisible by {world_size} ranks; valid numbers of ranks: "
                     f"{divisors(samples)}")
    size = c.shard_size or c.replica_size(world_size) or 1
    if c.distributed == "hsdp" and world_size % size:
        found.append(f"shard_size ({size}) does not divide {world_size} ranks; valid: "
                     f"{divisors(world_size)}")
    if c.save_precision and c.checkpoint_format == "sharded":
        found.append("save_precision needs whole weights: checkpoint_format: file, or convert the "
                     "checkpoint afterwards (python -m model.convert)")
    if not c.evaluates:
        found += [f"{setting} needs evaluations: eval_interval above 0"
                  for setting in needing_evaluations(c)]
    return found + getattr(c, "problems", list)()


def divisors(n):
    """Return the divisors of `n` up to 1,024 as a text, e.g. "1, 2, 4"."""
    return ", ".join(str(d) for d in range(1, min(n, 1024) + 1) if n % d == 0)


def needing_evaluations(c):
    """Return the settings of `c`, texts "key: value", that need evaluations; [] if none is set."""
    set_keys = dict(lr_schedule=c.lr_schedule == "plateau", eval_only=c.eval_only,
                    early_stopping_patience=c.early_stopping_patience, eval_tasks=c.eval_tasks)
    return [f"{name}: {getattr(c, name)}" for name, is_set in set_keys.items() if is_set]


# -----------------------------------------------------------------------------
# checks of keys with the data

def check_allowed(config, spec, state):
    """Raise ConfigError if allow_change has a name that no check compares.

    spec: Data.spec of the run. state: content of the checkpoint that the run starts from, or {}.
    """
    keys = key_fields.fields_by_name(config)
    others = sorted({"all", "data", *map(str, [*spec, *(state.get("spec") or {})])} - keys.keys())
    if unknown := [name for name in config.allow_change if name not in [*keys, *others]]:
        raise ConfigError([f"allow_change: unknown name {', '.join(unknown)}; expected keys of "
                           f"`run_train.py --model {config.model} --help`, {', '.join(others)}"])


def check_epochs(config, samples):
    """Raise SetupError if max_iters is more than MAX_EPOCHS_IN_STEPS epochs of `samples` samples.

    With max_epochs or eval_only, there is no limit.
    """
    epochs = config.max_iters * config.samples_per_step / samples
    if epochs > MAX_EPOCHS_IN_STEPS and not (config.max_epochs or config.eval_only):
        raise SetupError(
            f"max_iters: {config.max_iters:,} steps of {config.samples_per_step:,} samples are "
            f"{epochs:,.0f} epochs of the {samples:,} samples of the training data; for more than "
            f"{MAX_EPOCHS_IN_STEPS}, give the length in epochs, e.g. --max_epochs 3")


# -----------------------------------------------------------------------------
# comparing configurations

def find_differences(old, new, known=FIELDS):
    """Return [(key, old value, new value)] of keys that affect a run's results and differ.

    old, new: {key: value}; known: {key: dataclass field}, the keys to compare.
    Ignored are keys that only one dict has, and batch_size and gradient_accumulation_steps if the
    product of the two is equal. An old value [x] equals the new value x; dicts with a different key
    order differ.
    """
    batch = ("batch_size", "gradient_accumulation_steps")
    same_batch = math.prod(old.get(n, 1) for n in batch) == math.prod(new[n] for n in batch)
    differences = []
    for name, f in known.items():
        is_free = f.metadata.get("free") or f.metadata.get("start") or name in batch and same_batch
        if is_free or name not in old or name not in new:
            continue
        a, b = old[name], new[name]
        # The key layer was a list in earlier versions. The order of a dict counts: in lr_groups the
        # last matching pattern is used.
        if a not in (b, [b]) or isinstance(b, dict) and list(a) != list(b):
            differences.append((name, a, b))
    return differences


# -----------------------------------------------------------------------------
# printing

USAGE = f"""\
python run_train.py [--config FILE.yaml] [--key value | key=value | --flag | --no-flag]...
       torchrun --nproc_per_node=N run_train.py ...

  --config FILE         YAML file with keys (default: {DEFAULT_PATH}); its `base:` is another
                        file, read first; or a run's training_args.json
  best_config=FILE      the result of a search on top: only the keys that it changed
  fast=true             the keys for speed; deterministic=true: those for reproducible runs
  --model NAME --help   list the keys of model/NAME.py too; also --config FILE --help"""


def format_help(cls=TrainConfig):
    """Return the --help page of a configuration class: keys by group, type, default and meaning."""
    formatter = functools.partial(argparse.HelpFormatter, max_help_position=38, width=100)
    parser = argparse.ArgumentParser(usage=USAGE, formatter_class=formatter, add_help=False)
    for group, keys in group_fields(cls).items():
        listed = parser.add_argument_group(group)
        for f in keys:
            listed.add_argument(f"--{f.name}", help=key_fields.describe(f),
                                metavar=key_fields.base_type(f.type).__name__)
    return parser.format_help()


def format_config(config):
    """Return the YAML page of --print_config for a result of load_config(): values and origins."""
    lines = [f"# {line}" for line in describe_aliases(config)]
    config = config.inherit(dict(print_config=False))  # the page can be saved and used as --config
    for path in input_files(config, (True,)).values():
        lines.append(f"# The shape of {path!r} replaces the defaults of the model.")
    for group, keys in group_fields(type(config)).items():
        lines.append(f"# {group}")
        for f in keys:
            value = yaml.safe_dump(getattr(config, f.name), default_flow_style=True, width=10**9,
                                   sort_keys=False)
            text = f"{f.name}: {value.strip().removesuffix('...').strip()}"
            lines.append(f"{text:<44} # {config.origins.get(f.name, 'default')}")
    return "\n".join(lines)


def describe_aliases(config):
    """Return console notes about other trainers' names in `config`, a result of load_config()."""
    notes = []
    ignored = {}  # {reason: names}
    for name, where in config.origins.items():
        alias = where.rpartition(":")[2].partition(" as ")[2]
        if name not in vars(config):
            ignored.setdefault(ALIASES.hints[name], []).append(name)
        elif alias:
            hint = f" ({ALIASES.hints[alias]})" if alias in ALIASES.hints else ""
            notes.append(f"Note: {alias} read as {name} {getattr(config, name)}{hint}")
    return notes + [f"Note: {', '.join(names)} ignored: {why}" for why, names in ignored.items()]


def to_yaml(config):
    """Return the configuration as YAML for load_config(), without START_KEYS (resume, ...)."""
    values = {k: v for k, v in asdict(config).items() if k not in START_KEYS}
    has_nel = "\\x85" in repr(values)  # PyYAML escapes U+0085 only if it escapes all of Unicode
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=not has_nel)
