"""Reading, checking and showing a configuration. The keys are declared in train/keys.py.

Values are parsed by the type of their key, never by YAML's guesses (in YAML 1.1 `1e-4` is text,
`010` is eight and `1:30` is ninety), so a file and the command line accept exactly the same text.
"""

import functools
import importlib
import math
import os
import re
import symtable
import sys
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass

if sys.version_info < (3, 10):  # noqa: UP036  every command imports this file
    sys.exit("Python 3.10 or newer is needed, this is " + sys.version.split()[0])

import yaml

from train.base.errors import ConfigError
from train.base.fields import TYPES, PlainLoader, base_type, key, nearest, parse_value, to_list  # noqa: F401
from train.keys import (
    FIELDS,
    GROUP_NAMES,
    GROUPS,
    START_KEYS,
    GPTKeys,  # noqa: F401  for others to import, and key
    TrainConfig,
)

REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DEFAULT_PATH = os.path.join("train", "config.yaml")
MAX_YAML = 1 << 16  # characters of a file: a second of reading


# -----------------------------------------------------------------------------
# the keys of a model file

def load_model_file(name):
    """The module model/NAME.py; ConfigError where there is none, or where it builds no model. That
    is read off its text: what is no system is not imported."""
    path = model_path(name) if re.fullmatch(r"[A-Za-z]\w*", name) else None
    if path and defines(path, "build_model"):
        return importlib.import_module(f"model.{name}")
    folder = os.path.join(REPOSITORY, "model")
    names = {entry.partition(".")[0] for entry in os.listdir(folder)}
    known = sorted(n for n in names if model_path(n) and defines(model_path(n), "build_model"))
    what = (f"{os.path.relpath(path, REPOSITORY)} has no build_model(config, data): it is no "
            "system that can be trained" if path else f"there is no model/{name}.py")
    raise ConfigError([f"model: {what}; expected one of {', '.join(known)}, or a file of your own "
                       "with build_model(config, data)"])


def model_path(name):
    """The file or package of that name in model/, None where there is none."""
    paths = (os.path.join(REPOSITORY, "model", file) for file in (f"{name}.py",
                                                                  f"{name}/__init__.py"))
    return next(filter(os.path.isfile, paths), None)


def defines(path, name):
    """Whether the Python file at `path` defines or imports `name` at its top level. Of a file that
    is no valid Python true: importing it says where."""
    try:
        with open(path, encoding="utf-8") as f:
            return name in top_level(f.read())
    except (SyntaxError, ValueError):
        return True


@functools.cache
def top_level(source):
    """The names at the top level of a Python file's text."""
    return set(symtable.symtable(source, "?", "exec").get_identifiers())


@functools.cache
def config_class(model="gpt"):
    """TrainConfig and, beside its keys, those of the class Keys of model/NAME.py. The file is
    imported only if it is not gpt, so that plain --help needs no torch."""
    keys = None if model == "gpt" else getattr(load_model_file(model), "Keys", None)
    if keys is None:
        return TrainConfig
    keys = keys if is_dataclass(keys) else dataclass(keys)
    if clash := [f.name for f in fields(keys) if f.name in FIELDS]:
        raise ConfigError([f"model/{model}.py: Keys has {', '.join(clash)}, which every run has "
                           "already: choose another name"])
    return dataclass(type("TrainConfig", (TrainConfig, keys), {"__doc__": TrainConfig.__doc__}))


def groups_of(cls):
    """{group: names of its keys} of a configuration class."""
    out = {group: [f.name for f in fields(keys)] for group, keys in GROUPS.items()}
    if own := [f.name for f in fields(cls) if f.name not in FIELDS]:
        out["Of this model"] = own
    return out


# -----------------------------------------------------------------------------
# YAML files: a strict mapping of key to text, with the line of each

def find_file(path):
    """`path`, or where there is no such file, the same path inside the repository."""
    path = os.path.expanduser(path)
    inside = os.path.join(REPOSITORY, path)
    return inside if not os.path.exists(path) and os.path.exists(inside) else path


def read_yaml(path, problems, groups=()):
    """The file at `path` as {key: (raw value, "path:line")}, keys inside of `groups` included; what
    is wrong goes to `problems`."""
    expected = f"expected `key: value` lines, as in {DEFAULT_PATH}"
    try:
        with open(path, encoding="utf-8") as f:
            text = f.read(MAX_YAML + 1)
        if len(text) > MAX_YAML:
            raise yaml.YAMLError(f"more than {MAX_YAML:,} characters")
        root = yaml.compose(text, PlainLoader)
        if isinstance(root, yaml.MappingNode):
            return read_mapping(root, path, problems, groups)
        what = f"found a {root.id} at top level" if root else "the file is empty"
        problems.append(f"{path}: {what}; {expected}")
    except FileNotFoundError:
        problems.append(f"{path}: no such file; {expected}")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{path}: cannot be read as UTF-8 text ({error})")
    except yaml.MarkedYAMLError as error:
        hint = "; indent with spaces, not tabs" if "\\t" in error.problem else ""
        problems.append(f"{path}:{error.problem_mark.line + 1}: not valid YAML: "
                        f"{error.problem}{hint}")
    except yaml.YAMLError as error:  # a character that YAML does not allow, for one
        problems.append(f"{path}: not valid YAML: {error}")
    return {}


def read_mapping(root, path, problems, groups):
    """{key: (raw value, where)} of a YAML mapping; groups of keys are read as what is in them."""
    out = {}
    for key_node, value_node in root.value:
        name, where = str(key_node.value), f"{path}:{key_node.start_mark.line + 1}"
        if isinstance(value_node, yaml.MappingNode) and name in groups:
            inner = read_mapping(value_node, path, problems, groups)
        else:
            try:
                inner = {name: (plain(value_node), where)}
            except ValueError as error:
                problems.append(f"{where}: {name}: {error}")
                continue
        for n in out.keys() & inner.keys():
            problems.append(f"{inner[n][1]}: {n} is set twice (first at {out[n][1]}); keep one")
        out |= inner
    return out


def plain(node):
    """A YAML node as str, list or dict. Tags that would build objects are refused, never run."""
    if not node.tag.startswith("tag:yaml.org,2002:") or "python" in node.tag:
        raise ValueError(f"the tag {node.tag!r} is not allowed; expected a plain value")
    if isinstance(node, yaml.MappingNode):
        return {str(k.value): plain(v) for k, v in node.value}
    return [plain(v) for v in node.value] if isinstance(node, yaml.SequenceNode) else node.value


def read_with_bases(path, problems, seen=()):
    """Like read_yaml, with the files named by `base:` underneath (paths relative to the file). A
    run's training_args.json is its `arguments`."""
    if os.path.abspath(path) in seen:
        problems.append(f"{path}: base files form a circle")
        return {}
    values = read_yaml(path, problems, GROUP_NAMES)
    if "arguments" in values and isinstance(values["arguments"][0], dict):
        arguments, where = values["arguments"]
        return {k: (v, where) for k, v in arguments.items() if k not in START_KEYS}
    base = values.pop("base", None)
    if base is None:
        return values
    base_path = os.path.join(os.path.dirname(path), os.path.expanduser(str(base[0])))
    return over(read_with_bases(base_path, problems, (*seen, os.path.abspath(path))), values)


def over(below, above):
    """Two dicts as one: what `above` says counts, and comes last."""
    return {k: v for k, v in below.items() if k not in above} | above


def translated(raw, known, problems):
    """{key: (value, where)} of `raw`, in which keys may have the names that other trainers give
    them; of two names for a key the later one counts. `where` then ends in "as NAME"."""
    out = {}
    for name, (value, where) in raw.items():
        ours, value, as_name = our_name(name, value, known)
        if as_name:
            if value is None:  # fp16: false
                continue
            file, where = where.rpartition(":")[0], where + as_name
            if ours in out and file and out[ours][1].startswith(f"{file}:"):
                problems.append(f"{where}: {ours} is set twice (first at {out[ours][1]}); keep one")
        out[ours] = (value, where)
    return out


@functools.cache
def other_names():
    """({name elsewhere: (our key, {word elsewhere: ours, None: it says nothing here})}, {name
    elsewhere: what to do in place of such a key}) of train/other_names.yaml."""
    with open(os.path.join(os.path.dirname(__file__), "other_names.yaml"), encoding="utf-8") as f:
        table = yaml.load(f, PlainLoader)
    keys = {name: (ours, {}) for ours, names in table["names"].items() for name in names.split()}
    for names, words in table["words"].items():
        ours = words.pop("key")
        keys |= dict.fromkeys(names.split(), (ours, {w: v or None for w, v in words.items()}))
    return keys, {name: hint for names, hint in table["hints"].items() for name in names.split()}


def our_name(name, value, known):
    """(our key, its value or None: it says nothing here, " as NAME") for a key's `name` elsewhere;
    what is known here stays, with "" last. value: None where a flag stands alone."""
    if name in known or name not in other_names()[0]:
        return name, value, ""
    ours, words = other_names()[0][name]
    if value is None and words:
        value = "true"
    return ours, words.get(str(value).lower(), value), f" as {name}"


def names_of_others(origins):
    """A line on the names of other trainers among the `origins` of values, "" without any."""
    found = [f"{where.rpartition(' as ')[2]} is {name}" for name, where in origins.items()
             if " as " in where]
    return f"Other names of keys: {', '.join(found)}" if found else ""


# -----------------------------------------------------------------------------
# the command line

def take_config(argv):
    """The path given as --config PATH, --config=PATH or a first argument FILE.yaml; the rest."""
    path, rest, argv = DEFAULT_PATH, [], list(argv)
    if argv and argv[0].endswith((".yaml", ".yml", ".json")) and "=" not in argv[0]:
        path = argv.pop(0)
    while argv:
        a = argv.pop(0)
        if a == "--config" and argv:
            path = argv.pop(0)
        elif a.startswith("--config="):
            path = a.partition("=")[2]
        else:
            rest.append(a)
    return find_file(path), rest


def load_argv(argv):
    """Return the configuration that these arguments of run_train.py describe."""
    return load_config(*take_config(argv))


def parse_options(argv, problems):
    """argv tokens as [(key, text or None)]. Forms: --key value, --key=value, key=value, --flag; a
    group before the name is allowed (model.n_layer=4)."""
    out, tokens = [], list(argv)
    while tokens:
        token = tokens.pop(0)
        dotted, equals, text = token.lstrip("-").partition("=")
        group, _, name = dotted.replace("-", "_").rpartition(".")
        if not token.startswith("-") and not equals:
            problems.append(f"command line: {token!r}: expected --key value or key=value")
        elif group and group not in GROUP_NAMES:
            problems.append(f"command line: {token}: there is no group {group!r}; groups are "
                            f"{', '.join(sorted(GROUP_NAMES))}, and may be left out")
        else:
            if not equals:  # what follows is its value, unless that is an option itself
                follows = tokens and not re.match(r"--?[A-Za-z]|[\w.]+=", tokens[0])
                text = tokens.pop(0) if follows else None
            out.append((name, text))
    return out


def option_values(options, known, problems):
    """{key: (text, "command line")} of parse_options' pairs: flags get a value, lists add up."""
    kinds, out = {name: base_type(f.type) for name, f in known.items()}, {}
    flags = {n for n, f in known.items()
             if kinds[n] is bool or "true" in f.metadata.get("choices", ())}
    for name, text in options:
        given, (name, text, as_name) = text, our_name(name, text, known)
        if as_name and text is None and given is not None:  # fp16=false
            continue
        if text is None and name in flags:
            text = "true"
        elif text is None and name not in known and name.removeprefix("no_") in flags:
            name, text = name.removeprefix("no_"), "false"
        elif text is None and name in known:
            problems.append(f"command line: --{name} needs a value: {TYPES[kinds[name]][1]}")
            continue
        if name in out and kinds.get(name) is list:
            text = to_list(out[name][0]) + to_list(text)
        out[name] = (text or "", "command line" + as_name)
    return out


def load_config(path: str | os.PathLike | None = None,
                overrides: Iterable[str] | Mapping[str, object] = ()) -> TrainConfig:
    """The configuration of a run: defaults, then the file at `path` (with its bases), then
    `overrides` (command-line tokens, or a dict of Python values). Raises ConfigError with all
    problems at once."""
    return load_with_origins(path, overrides)[0]


def load_with_origins(path=None, overrides=()):
    """load_config's result and {key: where its value came from}."""
    problems = []
    cls, raw = read_values(path, overrides, problems)
    known, values, wrong = {f.name: f for f in fields(cls)}, {}, set()
    for name, (text, where) in raw.items():
        if name not in known:
            hint = ""
            if len(problems) < 20:  # it takes time
                theirs = (n for n, (ours, _) in other_names()[0].items() if ours in known)
                hint = nearest(name, [*known, *theirs])
            problems.append(f"{where}: unknown key {name!r}{hint}; " + other_names()[1].get(
                name, "`python run_train.py --help` lists the keys"))
            continue
        try:
            values[name] = parse_value(known[name], text)
        except ValueError as error:
            problems.append(f"{where}: {name}: {error}")
            wrong.add(name)
    config = cls(**values)
    typed = {n for n, (_, where) in raw.items() if where.startswith("command line")}
    if "max_minutes" in typed and (other := typed & {"max_iters", "max_epochs"}):
        problems.append(f"max_minutes and {other.pop()} are both a length: give one of them")
    problems += [text for names, text in conflicts(config) if not wrong & names]
    if problems:
        raise ConfigError(problems)
    config.explicit = {n for n, (_, where) in raw.items()
                    if where.startswith(("command line", "overrides"))}
    return config, {name: where for name, (_, where) in raw.items()}


def read_values(path, overrides, problems):
    """(the configuration class of the model that is asked for, {key: (raw value, where)}); what is
    wrong goes to `problems`."""
    options, raw = [], read_with_bases(find_file(path), problems) if path is not None else {}
    if isinstance(overrides, dict):
        raw = over(raw, {name: (value, "overrides") for name, value in overrides.items()})
    else:
        options = parse_options(overrides, problems)
    for name, file in options:  # what a search found: above the file, below the command line
        if name == "best_config":
            found = read_with_bases(find_file(file or ""), problems)
            raw = over(raw, {k: v for k, v in found.items() if k not in ("data_dir", "out_dir")})
    model = raw.get("model", ("gpt", ""))[0]
    cls = config_class(str(dict(options).get("model", model)))
    options = [o for o in options if o[0] != "best_config"]
    known = {f.name: f for f in fields(cls)}
    return cls, translated(raw, known, problems) | option_values(options, known, problems)


def files_read(config, kinds=(True, "apart")):
    """{key: path} of the files that a run of `config` reads, such as weights to start from; kinds:
    what its keys have for `reads`."""
    named = {f.name: getattr(config, f.name) for f in fields(config)
             if f.metadata.get("reads") in kinds}
    return {name: path for name, path in named.items() if path not in (None, "", "scratch")}


# -----------------------------------------------------------------------------
# what must hold between keys

def conflicts(c):
    """[(the keys concerned, what is wrong between them)]."""
    out = gpt_conflicts(c) if c.model == "gpt" else []
    if c.min_lr is not None and c.min_lr > c.learning_rate:
        out.append(({"min_lr", "learning_rate"},
                    f"min_lr ({c.min_lr}) must not exceed learning_rate ({c.learning_rate})"))
    world_size, samples = os.environ.get("WORLD_SIZE", ""), c.samples_per_step
    if world_size.isdigit() and samples % max(1, int(world_size)):
        valid = [str(w) for w in range(1, samples + 1) if samples % w == 0]
        more = ", ..." if len(valid) > 12 else ""
        out.append(({"batch_size", "gradient_accumulation_steps"},
                    f"batch_size x gradient_accumulation_steps ({c.batch_size} x "
                    f"{c.gradient_accumulation_steps} = {samples} samples a step) cannot be shared "
                    f"equally by {world_size} ranks; valid numbers of ranks: "
                    f"{', '.join(valid[:12])}{more}"))
    for name, needs in (("lr_schedule", c.lr_schedule == "plateau"), ("eval_only", c.eval_only),
                        ("early_stopping_patience", c.early_stopping_patience),
                        ("eval_tasks", c.eval_tasks)):
        if needs and not c.eval_interval and not c.eval_epochs:
            out.append(({name, "eval_interval"}, f"{name}: {getattr(c, name)} needs evaluations: "
                        "eval_interval above 0"))
    return out + [(set(), text) for text in getattr(c, "problems", list)()]


def gpt_conflicts(c):
    """The same for the shape of a GPT; model files built on it use this as well."""
    out, head = [], c.n_embd // c.n_head
    if c.family:  # has heads of its own size
        pass
    elif c.n_embd % c.n_head:
        out.append(({"n_embd", "n_head"},
                    f"n_embd ({c.n_embd}) must be a multiple of n_head ({c.n_head})"))
    elif c.pos == "rope" and head % 2:
        out.append(({"n_embd", "n_head", "pos"},
                    f"n_embd / n_head ({head}) must be even for pos: rope"))
    if c.n_kv_head and c.n_head % c.n_kv_head:
        out.append(({"n_kv_head", "n_head"},
                    f"n_kv_head ({c.n_kv_head}) must divide n_head ({c.n_head})"))
    return out


def check_shape(shape, weights):
    """ValueError where `shape`, a GPTConfig that a file describes, has values that no run could
    have, or is no shape of the `weights` {name: tensor} beside it."""
    known = {f.name: f for f in fields(shape)}
    for name in known:
        checked(name, getattr(shape, name), known)
    if wrong := [text for _, text in gpt_conflicts(shape)]:
        raise ValueError("; ".join(wrong))
    check_size(shape, weights)


def checked(name, value, known):
    """`value` as that of a key in `known`. ValueError, with the name, where it is none."""
    try:
        return parse_value(known[name], value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def check_size(shape, weights):
    """ValueError where a shape is too large for its weights by far: what is made for it before they
    are compared (blocks, tables of positions and of tokens) would take all time or memory."""
    held = sum(t.numel() for t in weights.values())
    table = shape.block_size * getattr(shape, "head_dim", shape.n_embd // shape.n_head)
    for value, most, what in (
            (shape.n_layer, max(256, len(weights)), "blocks"), (table, max(1 << 24, held),
             "numbers of positions"), (shape.vocab_size or 0, max(1 << 20, held), "token ids")):
        if not 0 <= value <= max(most, 0):
            raise ValueError(f"a shape of {value:,} {what} for {len(weights):,} tensors of "
                             f"{held:,} numbers: its model_args or config are not its own")


def settled(values):
    """`values` with what a key left out means where another key says it."""
    means = dict(min_lr=lambda v: v["learning_rate"] / 10, n_hidden=lambda v: 4 * v["n_embd"],
                 n_kv_head=lambda v: v["n_head"])
    return values | {n: f(values) for n, f in means.items() if values.get(n, 0) is None}


def differences(old, new, known=FIELDS):
    """Keys whose change would change what a run computes: [(key, old value, new value)].
    `old` and `new` are dicts. The micro-batch may change as long as the global batch does not."""
    both = [n for n, f in known.items() if n in old and n in new
            and not (f.metadata.get("free") or f.metadata.get("start"))]
    old, new = settled(old), settled(new)
    batch = {"batch_size", "gradient_accumulation_steps"}
    if batch <= set(both) and math.prod(old[n] for n in batch) == math.prod(new[n] for n in batch):
        both = [n for n in both if n not in batch]

    def same(a, b):
        floats = isinstance(a, float) and isinstance(b, float)
        return math.isclose(a, b, rel_tol=1e-12) if floats else a == b
    return [(n, old[n], new[n]) for n in both if not same(old[n], new[n])]


# -----------------------------------------------------------------------------
# showing the keys

def help_text(cls=TrainConfig):
    """The --help page: every key by group, with type, default and meaning."""
    lines = ["usage: python run_train.py [--config FILE.yaml] [--key value | --key=value |",
             "                            key=value | --flag | --no-flag]...",
             "       torchrun --nproc_per_node=N run_train.py ...", "",
             f"  --config FILE         YAML file of keys (default: {DEFAULT_PATH}); `base:` in it",
             "                        names a file underneath; or a run's training_args.json",
             "  best_config=FILE      a second file on top of it, from a search, say, but for",
             "                        its data_dir and out_dir",
             "  --print_config        print every key, its value and where it came from",
             "  --dry_run             estimate parameters, memory, tokens and time; write nothing",
             "  --model NAME --help   also the keys of model/NAME.py; --config FILE --help too",
             ""]
    known, defaults = {f.name: f for f in fields(cls)}, cls()
    for group, names in groups_of(cls).items():
        lines.append(f"{group}:")
        for name in names:
            meta, default = known[name].metadata, getattr(defaults, name)
            choices = f" ({' | '.join(meta['choices'])})" if "choices" in meta else ""
            shown = "" if default in (None, [], {}) else f" [{show_value(default)}]"
            meaning = textwrap.wrap(f"{meta.get('help', '')}{choices}{shown}", 60) or [""]
            option = f"--{name} {base_type(known[name].type).__name__}"
            lines.append(f"  {option:<36} {meaning[0]}")
            lines += [" " * 39 + line for line in meaning[1:]]
        lines.append("")
    return "\n".join(lines)


def describe(config, origins):
    """The --print_config page: valid YAML with the origin of each value."""
    lines = []
    for group, names in groups_of(type(config)).items():
        lines.append(f"# {group}")
        for name in names:
            text = f"{name}: {show_value(getattr(config, name))}"
            lines.append(f"{text:<44} # {origins.get(name, 'default')}")
    return "\n".join(lines)


def show_value(value):
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9).strip()
    return text.removesuffix("...").strip()


def to_yaml(config):
    """The configuration as YAML text that load_config reads back to the same run: without the keys
    that belong to a single start (resume, allow_change, eval_only)."""
    values = {k: v for k, v in asdict(config).items() if k not in START_KEYS}
    fast = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(values, Dumper=fast, sort_keys=False, allow_unicode=True)
