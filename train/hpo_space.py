"""The space of a hyperparameter search: a YAML file of keys and what to try, and how it narrows.

    learning_rate: {low: 1e-4, high: 1e-2, log: true}
    n_layer: {low: 2, high: 8, step: 2}
    optimizer: [adamw, muon]
    stages: [{trials: 12, max_iters: 200}, {trials: 6, max_iters: 1000, narrow: 0.3}]
"""

import json
import math
from dataclasses import asdict, dataclass

import yaml

from train.config import ConfigError, parse_value, read_yaml
from train.keys import FIELDS

OURS = ("out_dir", "resume", "eval_only", "allow_change")  # keys that belong to the search
RANGE = {"low", "high", "step", "log"}


@dataclass
class Stage:
    """`trials` runs of `max_iters` steps (None: as configured), in the space around the best of the
    stage before: `narrow` is the share of each range, and of the choices, that is left."""
    trials: int = 20
    max_iters: int | None = None
    narrow: float = 0.5


def read_space(path, stages=None, n_trials=None):
    """({key: list of choices or dict(low, high, step, log)}, [Stage]) of a YAML file; `stages`, as
    YAML text, or `n_trials`, for a single stage, replace its own. Raises ConfigError."""
    problems, space = [], {}
    raw = read_yaml(path, problems)
    listed, where = raw.pop("stages", (None, path))
    for name, (value, at) in raw.items():
        try:
            space[name] = parse_dimension(name, value)
        except ValueError as error:
            problems.append(f"{at}: {name}: {error}")
    if not raw and not problems:
        problems.append(f"{path}: nothing to search; expected lines such as "
                        "learning_rate: {low: 1e-4, high: 1e-2, log: true}")
    where = "--stages" if stages is not None else "--n_trials" if n_trials is not None else where
    try:
        if stages is not None:
            listed = yaml.load(stages, yaml.BaseLoader)
        elif n_trials is not None:
            listed = [{"trials": n_trials}]
        out = parse_stages(listed)
    except (ValueError, yaml.YAMLError) as error:
        reason = getattr(error, "problem", None) or error  # YAML's in one line
        problems.append(f"{where}: stages: {reason}; expected a list such as [{{trials: 12, "
                        "max_iters: 200}, {trials: 6, max_iters: 1000, narrow: 0.3}]")
    else:
        if "max_iters" in space and any(s.max_iters for s in out):
            problems.append(f"{where}: max_iters is both searched and set by stages; keep one")
    if problems:
        raise ConfigError(problems)
    return space, out


def parse_dimension(name, raw):
    """One entry of the space; raises ValueError with what was expected. Choices that are lists or
    mappings become JSON text, which Optuna can store and a configuration accepts."""
    if name not in FIELDS or name in OURS:
        raise ValueError("not a key that can be searched; `python run_train.py --help` lists them")
    if isinstance(raw, list):
        choices = [parse_value(name, v) for v in raw]
        choices = [json.dumps(v) if isinstance(v, (list, dict)) else v for v in choices]
        if len(choices) < 2 or len(set(choices)) < len(choices):
            raise ValueError(f"expected two or more different choices, got {raw}")
        return choices
    if not isinstance(raw, dict) or not {"low", "high"} <= set(raw) <= RANGE:
        raise ValueError("expected {low, high, log: true}, {low, high, step} or a list of choices; "
                         f"got {raw}")
    low, high = parse_value(name, raw["low"]), parse_value(name, raw["high"])
    if not all(type(v) in (int, float) for v in (low, high)):
        raise ValueError(f"has no range; list what to try: {name}: [a, b]")
    if not low < high:
        raise ValueError(f"low ({low}) must be below high ({high})")
    log = raw.get("log", "false").lower()
    if log not in ("true", "false") or log == "true" and ("step" in raw or low <= 0):
        raise ValueError("log: expected true or false; true needs low above 0 and no step")
    try:
        step = type(low)(raw["step"]) if "step" in raw else None
        if step is not None and not 0 < step <= high - low:
            raise ValueError
    except ValueError:
        raise ValueError(f"step: expected a step within the range, got {raw['step']!r}") from None
    if step:
        high = low + math.floor((high - low) / step + 1e-9) * step
    return dict(low=low, high=high, step=step, log=log == "true")


def parse_stages(raw):
    if raw is None:
        return [Stage()]
    if not isinstance(raw, list) or not raw:
        raise ValueError(f"got {raw!r}")
    kinds, out = dict(trials=int, max_iters=int, narrow=float), []
    for stage in raw:
        if not isinstance(stage, dict) or not {"trials"} <= set(stage) <= set(kinds):
            raise ValueError(f"got {stage!r}")
        s = Stage(**{k: kinds[k](v) for k, v in stage.items()})
        if s.trials < 1 or s.max_iters is not None and s.max_iters < 1 or not 0 < s.narrow <= 1:
            raise ValueError(f"out of range: {stage}")
        if not out and "narrow" in stage:
            raise ValueError("narrow: the first stage has nothing to narrow")
        out.append(s)
    return out


def narrowed(dim, best, share, scores):
    """`dim` around its `best` value: `share` of its range, inside it; of choices, the ones with the
    lowest of their `scores` [(value, score)]."""
    if isinstance(dim, list):
        order = sorted(dim, key=lambda v: min((s for c, s in scores if c == v), default=math.inf))
        return order[:math.ceil(share * len(dim))]
    f, back = (math.log, math.exp) if dim["log"] else (float, float)
    first, last = f(dim["low"]), f(dim["high"])
    half = share * (last - first) / 2
    ends = [back(min(max(f(best) + d, first), last)) for d in (-half, half)]
    if dim["step"]:
        ends = [dim["low"] + round((e - dim["low"]) / dim["step"]) * dim["step"] for e in ends]
    low, high = ((round(e) if isinstance(dim["low"], int) else e) for e in ends)
    return dict(dim, low=min(low, best), high=max(high, best))  # log and exp round


def contains(dim, value):
    """Whether a trial of `dim` could have this value."""
    if isinstance(dim, list):
        return value in dim
    if type(value) not in (int, float) or not dim["low"] <= value <= dim["high"]:
        return False
    steps = (value - dim["low"]) / (dim["step"] or 1)
    return not dim["step"] or abs(steps - round(steps)) < 1e-9


def with_params(config, params):
    """The values of `config` as a dict, with those of a trial. min_lr stays the same share of the
    peak unless it is searched itself."""
    values = asdict(config) | params
    if config.min_lr is not None and "min_lr" not in params:
        values["min_lr"] = config.min_lr * (values["learning_rate"] / config.learning_rate)
    return values


def distribution(dim):
    """`dim` as Optuna sees it."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
    if isinstance(dim, list):
        return CategoricalDistribution(dim)
    if isinstance(dim["low"], int):
        return IntDistribution(dim["low"], dim["high"], dim["log"], dim["step"] or 1)
    return FloatDistribution(dim["low"], dim["high"], dim["log"], dim["step"])
