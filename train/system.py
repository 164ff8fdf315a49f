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
    """Definitions in a file model/NAME.py, with defaults; load_model_type() returns an instance."""

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
        """Return the run's Data (train/dataloader.py); default: the token files of data_dir."""
        from train.dataloader import open_token_data
        return open_token_data(config, ranks)

    @staticmethod
    def build_model(config, data):
        """Return a new model, an nn.Module; every model file must define this function.

        It may read only data.spec of `data`, so that the model can be rebuilt from ckpt.pt. It is
        also called under torch.device("meta").
        """

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
    """Methods that a model (torch.nn.Module) may have besides `forward`, with defaults.

    forward(*batch) -> (loss, sums): the mean loss over the batch's items (tokens or rows), and
    {name: tensor} of sums over the items. sums["count"] is the item count (default: all items).
    Submodules with the attribute `is_block = True` are compiled and sharded one by one;
    `uses_muon`, true or false, decides whether Muon updates their `weight` (muon_parameters()).
    """

    def numbers(self, sums):
        """Return the numbers to log, {name: number, list of numbers or `None`}.

        sums: {name: CPU tensor}, over all batches and ranks, with "loss" (a sum, too) and "count".
        Default: each other 0-dim sum / count (`None` if the count is 0).
        LINE_NAMES in train/logger.py are reserved.
        """
        return {name: float(value / sums["count"]) if sums["count"] else None
                for name, value in sums.items()
                if name not in ("loss", "count") and value.dim() == 0}

    def initial(self, name, shape, seed):
        """Return the initial value of a parameter or persistent buffer, a tensor of shape `shape`.

        The value may depend only on the arguments, so that FSDP can fill a sharded model one tensor
        at a time. Default: `None`, i.e. the value assigned in __init__; FSDP does not support this.
        """
        return None

    def adopt(self, weights):
        """Return {name: tensor} for this model from {name: tensor} of another run (init_from).

        Missing parameters keep initial values. Called on rank 0 only. Default: `weights`.
        """
        return weights

    def before_step(self, it):
        """Set the state for step `it` before the first forward pass; also called for submodules.

        It may be called again after the step, since a resumed run may begin with an evaluation: it
        must not change parameters, or buffers that forward() or after_step() changes.
        """

    def after_step(self, it, sums):
        """Update state after optimizer step `it`, even a skipped one; not called for submodules.

        sums: {name: CPU tensor}, of forward() over the step and all ranks, with "loss" and "count".
        """

    def flops_per_unit(self):
        """Return forward and backward FLOPs per token or row (the loader's unit); 0: unknown."""
        return 0


class LoaderHooks:
    """Optional attributes of a loader, with defaults; train/dataloader.py lists the others."""

    # True if get_batch computes on the device; batches are then not prefetched.
    computes = False

    # Number of batches that are read at once.
    calls_per_chunk = 1

    def locate(self, step):
        """Return a text that locates batch get_batch(device, step) in the data, for messages."""
        return f"batch {step}"

    def source_of(self, index, count):
        """Return the source, e.g. a folder of a mixture, of validation batch `index`.

        count: batches requested per source. Default: "", for a loader with a single source.
        """
        return ""

    def merge(self, sums_by_source):
        """Return the total sums {name: tensor}, each source weighted by the share in the mixture.

        sums_by_source: {source: {name: tensor}}. Default: the sums of the only source, "".
        """
        return sums_by_source[""]

    def passes(self, samples):
        """Return an iterable of log lines, one per source of a mixture; by default none.

        A line has the epochs over the source in a run that uses `samples` samples of all sources.
        """
        return ()


def hook(owner, name):
    """Return the hook `name` of a model or loader: attribute or method, or the default here.

    Raises SetupError if `owner` has an attribute that is not callable in place of a method.
    """
    default = getattr(ModelHooks, name, None) or getattr(LoaderHooks, name)
    if hasattr(owner, name):
        own = getattr(owner, name)
        if callable(default) and not callable(own):
            raise SetupError(f"{type(owner).__name__}.{name}: a run calls the method of this name "
                             "(train/system.py); choose another name for the attribute")
        return own
    return functools.partial(default, owner) if callable(default) else default


def bind_before_step(model):
    """Return f(it), which calls before_step(it) of `model` and of all submodules that have it."""
    methods = [m.before_step for m in model.modules() if callable(getattr(m, "before_step", None))]
    return lambda it: [method(it) for method in methods]


def load_model_type(name):
    """Return the ModelType of model/NAME.py; ConfigError if the file or build_model is missing."""
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
    """Return the sorted names that `--model` accepts: modules in model/ except NOT_MODEL_TYPES."""
    names = {module.name for module in pkgutil.iter_modules([os.path.join(REPOSITORY, "model")])}
    return sorted(name for name in names - NOT_MODEL_TYPES if name.isidentifier())


def flops_per_step(model, config, loader):
    """Return the FLOPs, forward and backward, of an optimizer step over all ranks; 0: unknown.

    Parameters that lr_groups will freeze count as frozen. Raises ConfigError for invalid lr_groups.
    """
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
