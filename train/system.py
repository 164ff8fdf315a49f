"""The model interface: all functions that a run calls on a model type, with defaults.

A model type is one file model/NAME.py (or a folder), chosen by `--model NAME`. The training loop
uses model types only through this module:

    model_type = load_model_type("gpt")             # the functions and constants of model/gpt.py
    data = model_type.open_data(config, ranks)
    model = model_type.build_model(config, data)    # any torch.nn.Module
    numbers = hook(model, "numbers")(sums)          # the model's method or the default

Only `build_model` and `forward` are required.
"""

import functools
import importlib
import os
import pkgutil
import sys

from train.base.errors import ConfigError, SetupError

NOT_MODEL_TYPES = {"core", "sample", "serve", "convert", "eval"}  # the other folders in model/
REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class ModelType:
    """Definitions that a file model/NAME.py may have at module level, with their defaults:
    functions open_data, build_model (required), sample, inherit_shape, as_gpt; the class Keys
    (configuration keys); USE (a command), MUST_MATCH_TO_INIT (names) and STATISTICS ({name: key}).
    An instance is the model type that load_model_type() returns."""

    module = None  # the imported file

    # Dataclass with additional configuration keys (YAML, command line, --help, ckpt.pt). The
    # optional method `problems()` returns a list of messages about contradictory keys.
    Keys = None

    # Command that uses a finished run, printed at the end. Data.use replaces it, and
    # describes {out} and other names in it.
    USE = ""

    # Names in Data.spec or in the configuration that must have equal values in the checkpoint when
    # a run starts from trained weights (init_from).
    MUST_MATCH_TO_INIT = ()

    # {name in Data.spec of a statistic of the training data: the key without which the model does
    # not use it, or ""}. They must be equal, too, if trained weights are only evaluated, by
    # eval_only.
    STATISTICS = {}

    @staticmethod
    def open_data(config, ranks):
        """Return the Data of a run (train/dataloader.py). Default: the token files of data_dir."""
        from train.dataloader import open_token_data
        return open_token_data(config, ranks)

    @staticmethod
    def build_model(config, data):
        """Return a new model, an nn.Module, for `config` (a TrainConfig) and `data` (the run's
        Data). Of `data`, the function may only read data.spec, so that the model can be rebuilt
        from ckpt.pt. It is also called under torch.device("meta"). A model type must define this
        function."""

    # sample(model, data, config) -> list of texts for samples.txt, written at each evaluation.
    # It runs in eval mode without gradients: on all ranks if the model is sharded, otherwise
    # on rank 0.
    sample = None

    # inherit_shape(config, model_args) -> ({key: value}, [conflicts]): the configuration that a run
    # inherits from the weights that it starts from. Default: no key is inherited.
    inherit_shape = None

    # as_gpt(state, path, backbone) -> ({name: tensor}, GPTConfig): the GPT in a checkpoint,
    # for exports (model/convert). Default: it cannot be exported.
    as_gpt = None


class ModelHooks:
    """Methods that a model (torch.nn.Module) may have besides `forward`, with their defaults:
    numbers, initial, adopt, before_step, after_step, flops_per_unit.

    forward(*batch) -> (loss, sums): the mean loss over the batch's items, and {name: tensor} of
    sums over the items. sums["count"] is the number of items (default: all items of the batch).
    Submodules with the attribute `is_block = True` are compiled and sharded one by one; with
    `uses_muon`, true or false, Muon updates the weight or does not (muon_parameters()).
    """

    def numbers(self, sums):
        """Return the numbers to log, {name: number, list of numbers or `None`}; names in LINE_NAMES
        (train/logger.py) are reserved. sums: {name: CPU tensor}, added over all batches, with
        "loss" and "count". Default: each other 0-dim sum divided by the count (`None` if the count
        is 0)."""
        return {name: float(value / sums["count"]) if sums["count"] else None
                for name, value in sums.items()
                if name not in ("loss", "count") and value.dim() == 0}

    def initial(self, name, shape, seed):
        """Return the initial value, a tensor of the shape `shape`, of the parameter or persistent
        buffer `name`. seed: an int, the seed of the run. The value may depend only on the
        arguments, so that FSDP can fill a sharded model one tensor at a time. Default: `None`, i.e.
        the value assigned in __init__; FSDP does not support this."""
        return None

    def adopt(self, weights):
        """Convert `weights` {name: tensor} of a different model, with which the run starts
        (init_from). Return {name: tensor} with names and shapes of this model; parameters that are
        not in it keep their initial values. Called on rank 0 only. Default: unchanged."""
        return weights

    def before_step(self, it):
        """Called before the first forward pass of step `it` to set state that is a function of the
        step. It may be called again after the step, since a resumed run may begin with an
        evaluation: it must not change parameters, or buffers that forward() or after_step()
        changes. Submodules may have this method, too. Default: nothing."""

    def after_step(self, it, sums):
        """Called after optimizer step `it`, also if the update was skipped; not called for
        submodules. sums: {name: CPU tensor}, the sums of forward() over the step and all ranks,
        with "loss" and "count". Default: nothing."""

    def flops_per_unit(self):
        """Return the FLOPs of the forward and backward pass per token (per row if the loader's unit
        is "row"), for the MFU. Default: 0, unknown."""
        return 0


class LoaderHooks:
    """Attributes that a loader may have besides the required ones (get_batch, fixed_batch, n_fixed,
    fingerprint, samples, ...), with their defaults: computes (whether get_batch uses the device),
    calls_per_chunk (batches per read), locate, source_of, merge, passes."""

    # True if get_batch computes on the device; batches are then not prefetched.
    computes = False

    # Number of batches that are read at once.
    calls_per_chunk = 1

    def locate(self, step):
        """Return a text that states where in the data the batch get_batch(device, step) is, for
        messages."""
        return f"batch {step}"

    def source_of(self, index, count):
        """Return the name of the source, e.g. a folder of a mixture, of validation batch `index`,
        if `count` batches per source are requested. Default: "", for a loader with a single source.
        """
        return ""

    def merge(self, sums_by_source):
        """Return the total sums {name: tensor} over all sources, each weighted by the share of the
        source in the mixture. sums_by_source: {source: {name: tensor}}. Default: the sums of the
        only source, ""."""
        return sums_by_source[""]

    def passes(self, samples):
        """Return an iterable of lines for the log, one per source: the number of epochs over the
        source in a run of `samples` samples. Default: no lines."""
        return ()


def hook(owner, name):
    """Return the attribute or bound method `name` of `owner`, a model or a loader; if it is not
    defined, the default in ModelHooks or LoaderHooks. SetupError if `owner` has an attribute that
    is not callable in place of a method."""
    default = getattr(ModelHooks, name, None) or getattr(LoaderHooks, name)
    if hasattr(owner, name):
        own = getattr(owner, name)
        if callable(default) and not callable(own):
            raise SetupError(f"{type(owner).__name__}.{name}: a run calls the method of this name "
                             "(train/system.py); choose another name for the attribute")
        return own
    return functools.partial(default, owner) if callable(default) else default


def bind_before_step(model):
    """Return a function of the step number `it` that calls before_step(it) of `model` and of all
    its submodules that have this method."""
    methods = [m.before_step for m in model.modules() if callable(getattr(m, "before_step", None))]
    return lambda it: [method(it) for method in methods]


def load_model_type(name):
    """Import model/NAME.py and return a ModelType with the definitions in it, and defaults for
    missing ones. ConfigError if there is no such model type, or if it has no build_model."""
    known = model_types()
    if name not in known and f"model.{name}" not in sys.modules or name in NOT_MODEL_TYPES:
        raise ConfigError([f"model: there is no model type model/{name}.py; expected one of "
                           f"{', '.join(known)}, or a new file with build_model(config, data). "
                           "Weights to start from are named by init_from"])
    module = importlib.import_module(f"model.{name}")
    if not hasattr(module, "build_model"):
        raise ConfigError([f"model: model/{name}.py has no build_model(config, data); expected one "
                           f"of {', '.join(known)}, or a file with that function"])
    model_type = ModelType()
    model_type.module = module
    for attribute in vars(ModelType):
        if not attribute.startswith("__") and hasattr(module, attribute):
            setattr(model_type, attribute, getattr(module, attribute))
    return model_type


def model_types():
    """Return the names that `--model` accepts, sorted: the Python files and packages in model/,
    except NOT_MODEL_TYPES, which have other purposes."""
    names = {module.name for module in pkgutil.iter_modules([os.path.join(REPOSITORY, "model")])}
    return sorted(name for name in names - NOT_MODEL_TYPES if name.isidentifier())


def flops_per_step(model, config, loader):
    """Return the FLOPs, forward and backward, of an optimizer step over all ranks; 0: unknown.
    Parameters that lr_groups will freeze count as frozen. loader: of the training data. ConfigError
    for invalid lr_groups."""
    from train.optimizer import match_lr_groups, scale_rate  # here, because it imports torch
    frozen = [model.get_parameter(name)
              for name, own in match_lr_groups(config.lr_groups, model).items()
              if not scale_rate(config.learning_rate, own)]
    for p in frozen:
        p.requires_grad_(False)
    flops = hook(model, "flops_per_unit")()
    for p in frozen:  # build_optimizer freezes them
        p.requires_grad_(True)
    return flops * config.samples_per_step * loader.units_per_sample
