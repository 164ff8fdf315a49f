"""Configuration: one flat namespace of typed keys, read from YAML and the command line.

The keys themselves are declared in train/keys.py. Values are parsed by the type of their key, never
by YAML's guesses (in YAML 1.1 `1e-4` is a string, `010` is eight and `1:30` is ninety), so a file
and the command line accept exactly the same text.
"""

import difflib
import math
import os

import yaml

from train.keys import FIELDS, TrainConfig

DEFAULT_PATH = "train/config.yaml"


class UserError(Exception):
    """Something a person can act on: its message says what, where, what was expected and what to do.
    It ends the program with `exit_code` and without a traceback."""
    exit_code = 2


class ConfigError(UserError, ValueError):
    """A configuration that cannot be used. `problems` lists everything that is wrong with it."""

    def __init__(self, problems):
        self.problems = list(problems)
        count = f"{len(self.problems)} problem{'s'[:len(self.problems) != 1]}"
        super().__init__(f"configuration: {count}\n" + "\n".join(f"  - {p}" for p in self.problems))


# -----------------------------------------------------------------------------
# one value: from text (or a YAML node's text) to the type of its key

def parse_value(name, raw):
    """`raw` (str, list or dict of str; or a Python value) as the type of key `name`.
    Raises ValueError with what was expected."""
    kind, meta = FIELDS[name].type, FIELDS[name].metadata
    optional = "None" in str(kind)
    if raw is None or (isinstance(raw, str) and raw.strip().lower() in ("null", "none", "~", "")):
        if optional:
            return None
        if kind is not str or raw is None or raw.strip():
            raise ValueError(f"expected {type_name(name)}, got nothing")
    value = _PARSERS[base_type(kind)](raw)
    for v in value if isinstance(value, list) else [value]:
        _check_limits(v, meta)
    return value


def type_name(name):
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text",
             list: "a list", dict: "a mapping"}
    return names[base_type(FIELDS[name].type)]


def base_type(kind):
    for base in (bool, int, float, list, dict):
        if kind is base or str(kind).startswith(base.__name__):
            return base
    return str


def _parse_bool(raw):
    text = str(raw).lower()
    if text in ("true", "yes", "on"):
        return True
    if text in ("false", "no", "off"):
        return False
    raise ValueError(f"expected true or false, got {raw!r}")


def _parse_int(raw):
    try:
        if isinstance(raw, (bool, float)):
            raise ValueError
        return int(raw)
    except (ValueError, TypeError):
        raise ValueError(f"expected a whole number, got {raw!r}") from None


def _parse_float(raw):
    try:
        value = float(raw)
        if isinstance(raw, bool) or not math.isfinite(value):
            raise ValueError
        return value
    except (ValueError, TypeError):
        raise ValueError(f"expected a finite number, got {raw!r}") from None


def _parse_str(raw):
    if isinstance(raw, (list, dict)):
        raise ValueError(f"expected text, got {raw!r}")
    return str(raw).lower() if isinstance(raw, bool) else str(raw)


def _parse_list(raw):
    if isinstance(raw, str) and raw.strip().startswith("["):
        raw = yaml.load(raw, yaml.BaseLoader)
    if isinstance(raw, dict):
        raise ValueError(f"expected a list, got {raw!r}")
    return [str(v) for v in raw] if isinstance(raw, (list, tuple)) else [str(raw)]


def _parse_dict(raw):
    if isinstance(raw, str):
        try:
            raw = yaml.load(raw, yaml.BaseLoader)
        except yaml.YAMLError:
            pass
    if not isinstance(raw, dict):
        raise ValueError(f"expected a mapping such as {{wte: 0.5}}, got {raw!r}")
    return {str(k): {str(a): _parse_float(b) for a, b in v.items()} if isinstance(v, dict)
            else _parse_float(v) for k, v in raw.items()}


_PARSERS = {bool: _parse_bool, int: _parse_int, float: _parse_float, str: _parse_str,
            list: _parse_list, dict: _parse_dict}


def _check_limits(value, meta):
    tests = {"gt": ("above", lambda v, m: v > m), "ge": ("at least", lambda v, m: v >= m),
             "lt": ("below", lambda v, m: v < m), "le": ("at most", lambda v, m: v <= m)}
    for limit, (words, holds) in tests.items():
        if limit in meta and not holds(value, meta[limit]):
            raise ValueError(f"must be {words} {meta[limit]}, got {value}")
    if "choices" in meta and value not in meta["choices"]:
        raise ValueError(f"must be one of {', '.join(meta['choices'])}; got {value!r}"
                         + _nearest(str(value), meta["choices"]))


def _nearest(word, words):
    close = difflib.get_close_matches(word, words, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


# -----------------------------------------------------------------------------
# YAML files: a strict mapping of key to text, with the line of each

def read_yaml(path, problems):
    """The file at `path` as {key: (raw value, "path:line")}; what is wrong goes to `problems`."""
    try:
        with open(path, encoding="utf-8") as f:
            root = yaml.compose(f, yaml.SafeLoader)
    except FileNotFoundError:
        problems.append(f"{path}: no such file; expected a YAML file of `key: value` lines")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{path}: cannot be read as UTF-8 text ({error})")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error)
        where = f":{mark.line + 1}" if mark else ""
        hint = "; indent with spaces, not tabs" if "\\t" in what else ""
        problems.append(f"{path}{where}: not valid YAML: {what}{hint}")
    else:
        if isinstance(root, yaml.MappingNode):
            return _read_mapping(root, path, problems)
        found = "the file is empty" if root is None else f"found a {root.id} at top level"
        problems.append(f"{path}: {found}; expected `key: value` lines, as in {DEFAULT_PATH}")
    return {}


def _read_mapping(root, path, problems):
    out = {}
    for key_node, value_node in root.value:
        name, where = str(key_node.value), f"{path}:{key_node.start_mark.line + 1}"
        if name in out:
            problems.append(f"{where}: {name} is set twice (first at {out[name][1]}); keep one")
        try:
            out[name] = (_plain(value_node), where)
        except ValueError as error:
            problems.append(f"{where}: {name}: {error}")
    return out


def _plain(node):
    """A YAML node as str, list or dict. Tags that would build objects are refused, never run."""
    if not node.tag.startswith("tag:yaml.org,2002:") or "python" in node.tag:
        raise ValueError(f"the tag {node.tag!r} is not allowed; expected a plain value")
    if isinstance(node, yaml.MappingNode):
        return {str(k.value): _plain(v) for k, v in node.value}
    return [_plain(v) for v in node.value] if isinstance(node, yaml.SequenceNode) else node.value


def read_with_bases(path, problems, seen=()):
    """Like read_yaml, with the files named by `base:` underneath (paths relative to the file)."""
    if os.path.abspath(path) in seen:
        problems.append(f"{path}: base files form a circle")
        return {}
    values = read_yaml(path, problems)
    base = values.pop("base", None)
    if base is None:
        return values
    base_path = os.path.join(os.path.dirname(path), str(base[0]))
    return read_with_bases(base_path, problems, (*seen, os.path.abspath(path))) | values


# -----------------------------------------------------------------------------
# the command line

def parse_overrides(argv, problems):
    """argv tokens as {key: (text, "command line")}. Forms: --key value, --key=value, key=value,
    --flag, --no-flag; a group prefix (model.n_layer=4) is allowed and ignored."""
    out, tokens = {}, list(argv)
    while tokens:
        token = tokens.pop(0)
        name, has_value, text = token.lstrip("-").partition("=")
        name = name.replace("-", "_").rpartition(".")[2]
        if not token.startswith("-") and not has_value:
            problems.append(f"command line: {token!r} is not understood; "
                            "write --key value or key=value")
            continue
        if not has_value:
            negated = name.removeprefix("no_") if name not in FIELDS else name
            is_flag = negated in FIELDS and FIELDS[negated].type is bool
            next_is_value = tokens and (not tokens[0].startswith("-") or _is_number(tokens[0]))
            if negated != name and is_flag:
                name, text = negated, "false"
            elif is_flag and not next_is_value:
                text = "true"
            elif next_is_value:
                text = tokens.pop(0)
            elif name in FIELDS:
                problems.append(f"command line: --{name} needs a value: {type_name(name)}")
                continue
        out[name] = (text, "command line")
    return out


def _is_number(text):
    try:
        float(text)
        return True
    except ValueError:
        return False


def load_config(path=None, overrides=()):
    """The configuration of a run: defaults, then the file at `path` (with its bases), then
    `overrides` (command-line tokens, or a dict of Python values). Raises ConfigError with all
    problems at once."""
    return load_with_origins(path, overrides)[0]


def load_with_origins(path=None, overrides=()):
    """load_config's result and {key: where its value came from}."""
    problems = []
    raw = read_with_bases(path, problems) if path is not None else {}
    if isinstance(overrides, dict):
        raw |= {name: (value, "overrides") for name, value in overrides.items()}
    else:
        raw |= parse_overrides(overrides, problems)
    values, origins = {}, {}
    for name, (text, where) in raw.items():
        if name not in FIELDS:
            problems.append(f"{where}: unknown key {name!r}" + _nearest(name, FIELDS)
                            + "; `python run_train.py --help` lists the keys")
            continue
        try:
            values[name], origins[name] = parse_value(name, text), where
        except ValueError as error:
            problems.append(f"{where}: {name}: {error}")
    config = TrainConfig(**values)
    problems += [p for p in check(config, int(os.environ.get("WORLD_SIZE") or 1))
                 if not any(f" {p.split()[0]}" in other for other in problems)]
    if problems:
        raise ConfigError(problems)
    return config, origins


def check(c, world_size=1):
    """What is wrong between keys: a list of messages."""
    out = []
    if c.n_embd % c.n_head:
        out.append(f"n_embd ({c.n_embd}) must be a multiple of n_head ({c.n_head})")
    elif c.pos == "rope" and c.n_embd // c.n_head % 2:
        out.append(f"n_embd / n_head ({c.n_embd // c.n_head}) must be even for pos: rope")
    if c.n_kv_head and c.n_head % c.n_kv_head:
        out.append(f"n_kv_head ({c.n_kv_head}) must divide n_head ({c.n_head})")
    if c.min_lr is not None and c.min_lr > c.learning_rate:
        out.append(f"min_lr ({c.min_lr}) must not exceed learning_rate ({c.learning_rate})")
    if c.sequences_per_step % world_size:
        valid = [w for w in range(1, c.sequences_per_step + 1) if c.sequences_per_step % w == 0]
        out.append(f"batch_size x gradient_accumulation_steps ({c.batch_size} x "
                   f"{c.gradient_accumulation_steps} = {c.sequences_per_step} sequences a step) "
                   f"cannot be shared equally by {world_size} ranks; valid numbers of ranks: "
                   f"{', '.join(map(str, valid[:12]))}{', ...' if len(valid) > 12 else ''}")
    if c.optimizer == "muon" and c.distributed == "fsdp":
        out.append("optimizer: muon works on whole matrices and cannot run with distributed: fsdp; "
                   "use distributed: ddp or optimizer: adamw")
    if c.auto_batch and c.distributed == "fsdp" and world_size > 1:
        out.append("auto_batch tries batches on each rank alone, which a sharded model cannot do; "
                   "use distributed: ddp or set batch_size by hand")
    if c.lr_schedule == "plateau" and not c.eval_interval:
        out.append("lr_schedule: plateau follows val_loss and needs eval_interval above 0")
    if c.eval_only and not c.eval_interval:
        out.append("eval_only needs eval_interval above 0")
    if c.early_stopping_patience and not c.eval_interval:
        out.append("early_stopping_patience needs eval_interval above 0")
    return out


def differences(old, new):
    """Keys whose change would change what a run computes: [(key, old value, new value)].
    `old` and `new` are dicts. The micro-batch may change as long as the global batch does not."""
    both = [n for n, f in FIELDS.items() if not f.metadata.get("free") and n in old and n in new]
    changed = [(n, old[n], new[n]) for n in both if old[n] != new[n]]
    batch = ("batch_size", "gradient_accumulation_steps")
    if all(n in both for n in batch) and math.prod(old[n] for n in batch) == math.prod(
            new[n] for n in batch):
        changed = [c for c in changed if c[0] not in batch]
    return changed
