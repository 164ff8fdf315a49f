"""Check that an edited repository keeps its promises for a model type, in about a minute.

    python -m train.tools.check [--model NAME] [--config FILE] [--key value]...

Runs of 12 steps are compared with each other: killed and resumed, another split into micro-batches,
two ranks with DDP and FSDP. Then the model is examined: batches, gradients, evaluation, decoding,
initial values, FLOPs, export, keys. Each check prints one line: ok, differs or not applicable.
The exit code is 1 if a check differs. Default of --config: train/configs/NAME.yaml, or
train/config_test.yaml.
"""

import contextlib
import copy
import io
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from model.core.kv_cache import create_cache
from model.gpt import GPT
from model.sample.fused import pack_model, quantize_model
from train.base.checkpoint_file import load_checkpoint, named_tensors
from train.base.cli import run_command
from train.base.errors import SetupError, UserError
from train.base.fields import base_type, key
from train.config import load_config, to_yaml
from train.distributed import process_group
from train.keys import GPTKeys
from train.setup import open_data, open_run
from train.system import REPOSITORY, hook, load_model_type
from train.train import seed_step

# Small and quick; without dropout, whose random numbers differ between ranks.
SETTINGS = dict(
    batch_size=4, gradient_accumulation_steps=2, max_iters=12, lr_decay_iters=12, warmup_iters=2,
    max_epochs=None, eval_epochs=None, warmup_epochs=None, save_epochs=None,
    warmup_ratio=None, eval_interval=6, eval_iters=2, eval_tasks=[], save_interval=4,
    log_interval=1, early_stopping_patience=0, sample_tokens=0, tracker=[], dropout=0.0,
    device="cpu", dtype="float32", compile="false", num_threads=1)
KILLED_AT = 6
FORK = multiprocessing.get_context("fork")  # saves importing torch in every process
# Not compared: measurements, and the perplexity, which is a function of the loss.
NOT_COMPARED = {"time_ms", "tokens_per_sec", "mfu", "memory_mib", "val_ppl"}
TOLERANCE = 1e-4         # relative: sums in another order
NORM_TOLERANCE = 1e-2    # of gradient norms, which amplify rounding
LOGIT_TOLERANCE = 1e-3
INT8_TOLERANCE = 0.1     # standard deviations of the logits
GRADIENT_TOLERANCE = 0.1
MIN_LOSS_CHANGE = 3e-5   # relative: smaller changes are rounding in float32
FLOPS_TOLERANCE = 0.15   # norms and softmax do not count as FLOPs
# Options of GPTs with which keys are tried again that have no effect without them.
OPTIONS = dict(qk_norm=True, layer_types="FW", window=4)
NO_EFFECT_ON_LOSS = {"max_positions", "bos_id", "eos_ids", "vocab_size", "block_size"}


class Difference(Exception):
    """A check that failed; the text says where and by how much."""


class NotApplicable(Exception):
    """A check that is impossible for this model; the text is the reason."""


class Case:
    """A configuration that is checked, the folder of the runs, and the Run after the first one."""

    def __init__(self, config, folder):
        self.config = config
        self.folder = folder
        self.run = None

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def build(self, **changes):
        """Return (data, model) of the configuration with `changes`, with initial values."""
        config = load_config(self.path("first", "config.yaml"), changes)
        data = open_data(config, self.run.ranks)
        return data, load_model_type(config.model).build_model(config, data)

    def loss(self, model, batch, seed=1):
        """Return (loss, sums) of a batch, with random numbers that `seed` determines."""
        seed_step(seed, 0, self.run.ranks)
        return model(*batch)

    def tokens(self, rows):
        """Return random token ids (rows, T)."""
        c = self.run.raw_model.config
        generator = torch.Generator().manual_seed(0)
        return torch.randint(c.vocab_size, (rows, min(24, c.block_size)), generator=generator)


# -----------------------------------------------------------------------------
# runs

def train_rank(argv, environment, output):
    """Be one rank of a run: execute run_train.py in this process, which has imported torch already.
    output: the file descriptor of its stdout and stderr."""
    os.environ.update(environment)
    os.chdir(REPOSITORY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["run_train.py", *argv]
    runpy.run_path("run_train.py", run_name="__main__")


def train_in_process(case, name, *args, ranks=1, kill_at=None):
    """Run run_train.py into the folder `name`. kill_at: kill the process when it logs this step.
    Raises NotApplicable for a refusal, Difference for a crash."""
    argv = ["--config", case.path("config.yaml"), "--out_dir", case.path(name), *args]
    with socket.create_server(("127.0.0.1", 0)) as server:
        world = dict(WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                     MASTER_PORT=str(server.getsockname()[1]))
    reader, writer = os.pipe()
    processes = [
        FORK.Process(target=train_rank, daemon=True, args=(
            argv, world | dict(RANK=str(rank), LOCAL_RANK=str(rank)) if ranks > 1 else {}, writer))
        for rank in range(ranks)]
    for process in processes:
        process.start()
    os.close(writer)
    lines = []
    with open(reader) as output:  # to its end: all ranks have ended
        for line in output:
            lines.append(line.strip())
            if line.startswith(f"iter {kill_at}:"):
                processes[0].kill()
    for process in processes:
        process.join()
    codes = {process.exitcode for process in processes} - {0}
    if codes and codes != {-signal.SIGKILL}:
        raise (NotApplicable(f"refused: {lines[-1]}") if codes == {2} else
               Difference(" ".join(filter(None, lines[-8:]))))


def read_log(case, name):
    """Return {(step, name): number} of the metrics.jsonl in folder `name`."""
    with open(case.path(name, "metrics.jsonl")) as f:
        return {(record["iter"], k): v for record in map(json.loads, f) for k, v in record.items()
                if isinstance(v, (int, float)) and k not in NOT_COMPARED}


def compare_run(case, name, *args, ranks=1):
    """Compare the logged numbers of a run with those of the first run, up to rounding."""
    train_in_process(case, name, *args, ranks=ranks)
    expected, numbers = read_log(case, "first"), read_log(case, name)
    if missing := expected.keys() ^ numbers.keys():
        raise Difference(f"only one run logged {min(missing)}")
    errors = {at: abs(numbers[at] - x) / max(1.0, abs(x)) for at, x in expected.items()}
    for (step, what), error in errors.items():
        if not error <= (NORM_TOLERANCE if what == "grad_norm" else TOLERANCE):
            raise Difference(f"{what} of step {step}: {numbers[step, what]:.6g} instead of "
                             f"{expected[step, what]:.6g}")
    return f"largest relative difference of {len(errors)} numbers {max(errors.values()):.1e}"


def check_resume(case):
    train_in_process(case, "resumed", kill_at=KILLED_AT)
    try:
        train_in_process(case, "resumed", "--resume", "must")
    except NotApplicable as error:
        raise Difference(error) from None
    expected, tensors = (
        dict(named_tensors({part: state[part] for part in ("model", "optimizer")}))
        for state in (load_checkpoint(case.path(n, "ckpt.pt")) for n in ("first", "resumed")))
    for name in expected.keys() | tensors:
        if name not in expected or not torch.equal(expected[name], tensors.get(name)):
            raise Difference(f"{name} after a resume; is there state outside the state_dict?")
    if changed := read_log(case, "first").items() ^ read_log(case, "resumed").items():
        raise Difference(f"{min(changed)[0]} after a resume")
    return f"killed at step {KILLED_AT}; weights, optimizer and log equal to the bit"


def check_split(case):
    return compare_run(case, "split", "--batch_size", "2", "--gradient_accumulation_steps", "4",
                       "--eval_iters", "4")


def check_ddp(case):
    return compare_run(case, "ddp", ranks=2)


def check_fsdp(case):
    return compare_run(case, "fsdp", "--distributed", "fsdp", ranks=2)


# -----------------------------------------------------------------------------
# the model

def check_batches(case):
    loader, val = case.run.data.train, case.run.data.val
    first = loader.get_batch("cpu", 5)
    loader.get_batch("cpu", 2)
    pairs = list(zip(first, loader.get_batch("cpu", 5)))
    if val is not None:
        pairs += zip(*(val.fixed_batch(0, 2, torch.device("cpu")) for _ in range(2)))
    if not all(torch.equal(a, b) for a, b in pairs):
        raise Difference("a batch changes when it is requested again")
    return "functions of the step"


class FixedChoices(TorchFunctionMode):
    """Context in which topk repeats its choices of the first pass: with other choices the loss
    would jump. Set n_used to 0 before each pass."""

    def __init__(self):
        super().__init__()
        self.choices = []
        self.n_used = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if func not in (torch.topk, torch.Tensor.topk):
            return out
        self.n_used += 1
        if self.n_used > len(self.choices):
            self.choices.append(out.indices)
        index = self.choices[self.n_used - 1]
        return torch.return_types.topk((args[0].gather(-1, index), index))


def check_gradients(case):
    """Compare the slope of the loss along half of the gradient of each kind of parameter with
    central differences."""
    model = case.run.raw_model.train()
    batch = case.run.data.train.get_batch("cpu", 0)
    with FixedChoices() as fixed:
        loss = case.loss(model, batch)[0]
        loss.backward()
    kinds = {"".join(c for c in name if not c.isdigit()): (name, p)
             for name, p in model.named_parameters() if p.grad is not None}
    generator = torch.Generator().manual_seed(0)
    n_checked = 0
    for name, p in kinds.values():
        direction = p.grad * (torch.rand(p.shape, generator=generator) < 0.5)
        direction = direction / direction.norm().clamp(min=1e-12)
        slope = float((p.grad * direction).sum())
        step = min(2e-3 / max(slope, 1e-9), 0.02 * float(p.detach().norm().clamp(min=0.1)))
        if slope * step < MIN_LOSS_CHANGE * max(1.0, abs(loss.item())):
            continue
        losses = []
        with torch.no_grad(), fixed:
            for sign in (1, -2, 1):  # the last one restores the parameter
                p.add_(direction, alpha=sign * step)
                fixed.n_used = 0
                losses.append(case.loss(model, batch)[0].double().item())
        difference = (losses[0] - losses[1]) / (2 * step)
        if abs(difference - slope) > GRADIENT_TOLERANCE * slope:
            raise Difference(f"{name}: {slope:.4g}, by finite differences {difference:.4g}")
        n_checked += 1
    return f"{n_checked} parameters agree with finite differences"


def check_evaluation(case):
    data, model = case.build(dropout=0.5)
    batch = data.train.get_batch("cpu", 0)
    with torch.no_grad():
        a, b = (case.loss(model.eval(), batch, seed)[0].item() for seed in (1, 2))
    if a != b:
        raise Difference(f"two losses of a batch in eval mode: {a:.6g}, {b:.6g}")
    return "no random numbers"


def check_decoding(case):
    def decode(model):  # a prompt, then single tokens
        cache = create_cache(model, len(idx))
        parts = idx.split([T // 2] + [1] * (T - T // 2), dim=1)
        return torch.cat([model(part, cache=cache) for part in parts], dim=1)
    model = case.run.raw_model.eval()
    if not isinstance(model, GPT):
        raise NotApplicable("not a GPT")
    idx = case.tokens(rows=2)
    T = idx.size(1)
    with torch.no_grad():
        full = model(idx)
        try:
            decode(model)
        except ValueError as error:
            raise NotApplicable(f"refused: {error}") from None
        packed = pack_model(copy.deepcopy(model))
        logits = {"cached": decode(model), "packed": packed(idx), "packed, cached": decode(packed)}
        rounding = (quantize_model(copy.deepcopy(model))(idx) - full).abs().mean() / full.std()
    for name, error in {name: compare_logits(z, full) for name, z in logits.items()}.items():
        if not error <= LOGIT_TOLERANCE:
            raise Difference(f"{name} logits differ by {error:.2g}")
    if not rounding <= INT8_TOLERANCE:
        raise Difference(f"int8 logits differ by {rounding:.2g} standard deviations")
    return f"equal logits: {'; '.join(logits)}; int8 within {rounding:.1e} standard deviations"


def compare_logits(a, b):
    """Return the largest difference, relative to the largest logit (at least 1)."""
    return ((a - b).abs().max() / b.abs().max().clamp(min=1)).item()


def check_initial(case):
    """Compare initial(), which fills a sharded model, with the values of a new model."""
    model = case.build()[1]
    values = {name: (hook(model, "initial")(name, t.shape, case.config.seed), t)
              for name, t in model.state_dict().items()}
    values = {name: pair for name, pair in values.items() if pair[0] is not None}
    for name, (value, tensor) in values.items():
        if not torch.equal(value.to(tensor.dtype), tensor):
            raise Difference(f"{name}: initial() gives another value than a new model has")
    if not values:
        raise NotApplicable("no initial()")
    return f"{len(values)} tensors by initial()"


def check_flops(case):
    model = case.run.raw_model.train()
    loader = case.run.data.train
    batch = loader.get_batch("cpu", 0)
    expected = hook(model, "flops_per_unit")() * len(batch[0]) * loader.units_per_sample
    if not expected or hook(loader, "computes"):
        raise NotApplicable("no flops_per_unit(), or the loader computes too")
    # The counter does not know the fused attention of a CPU.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        case.loss(model, batch)[0].backward()
    counted = counter.get_total_flops()
    at_most = loader.unit == "row"  # expected of the longest row
    if (counted > (1 + FLOPS_TOLERANCE) * expected
            or counted < (1 - FLOPS_TOLERANCE) * expected and not at_most):
        raise Difference(f"{expected:.3g} per micro-batch; PyTorch counts {counted:.3g}")
    return f"PyTorch counts {counted / expected:.2f} of it"


def check_export(case):
    process = subprocess.run(
        [sys.executable, "-m", "model.convert", "--ckpt", case.path("first", "ckpt.pt"), "--to",
         case.path("export")], cwd=REPOSITORY, text=True, capture_output=True)
    message = (process.stderr.strip() or process.stdout.strip() or " ").splitlines()[-1]
    if process.returncode == 2:
        return f"refused: {message}"
    if process.returncode:
        raise Difference(message)
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise NotApplicable("transformers is not installed") from None
    idx = case.tokens(rows=1)
    other = AutoModelForCausalLM.from_pretrained(case.path("export"), dtype=torch.float32).eval()
    with torch.no_grad():
        logits = case.run.raw_model.eval()(idx)
        error = compare_logits(other(idx).logits[..., :logits.size(-1)], logits)
    if not error <= LOGIT_TOLERANCE:
        raise Difference(f"the logits of {type(other).__name__} differ by {error:.2g}")
    return f"{type(other).__name__}: logits differ by {error:.1e}"


# -----------------------------------------------------------------------------
# keys

def candidates(field, value):
    """Return other values of a configuration key, as far as they can be guessed."""
    kind = base_type(field.type)
    values = field.metadata.get("choices", ())
    if kind is bool:
        values = (not value,)
    elif kind is int:
        values = ((value or 2) * 2, (value or 2) // 2, 1, 4)
    elif kind is float:
        values = ((value or 0.25) * 2, (value or 0.5) / 2)
    return [v for v in values if v != value]


def fingerprint(case, changes):
    """Return what a configuration results in: the losses, sums and gradients of two steps of
    gradient descent, batches, FLOPs. None if it is refused."""
    try:
        data, model = case.build(**changes)
        results = [hook(model, "flops_per_unit")(), len(list(model.parameters())),
                   getattr(getattr(model, "config", None), "rolls", None)]
        for it in (0, 7):  # later batches depend on buffers
            batch = data.train.get_batch("cpu", it)
            loss, sums = case.loss(model.train(), batch)
            loss.backward()
            results += [loss.item(), *(t.tolist() for t in (*batch, *sums.values()))]
            for p in (p for p in model.parameters() if p.grad is not None):
                results.append(p.grad.double().sum().item())
                p.data.sub_(p.grad, alpha=0.1)
                p.grad = None
            hook(model, "after_step")(it, dict(count=torch.tensor(len(batch[0]))) | sums)
        return results
    except (UserError, ValueError):
        return None
    except Exception as error:
        raise Difference(f"{changes}: {type(error).__name__}: {error}") from error


def check_keys(case):
    """Set each key of the model to other values, alone and together with other keys."""
    c = case.config
    own = fields(load_model_type(c.model).Keys or Settings)
    inherits = c.init_from != "scratch" or getattr(c, "backbone", "")
    shared = fields(GPTKeys) if isinstance(case.run.raw_model, GPT) else ()
    changes = {f.name: [{f.name: v} for v in candidates(f, getattr(c, f.name))]
               for f in (*own, *([] if inherits else shared))
               if hasattr(c, f.name) and f.name not in NO_EFFECT_ON_LOSS}
    pending = {name for name in changes if changes[name]}
    n_keys = len(pending)
    for other in [{}, OPTIONS, *(change for f in own for change in changes.get(f.name, ()))]:
        base = fingerprint(case, other) if pending else None
        if base is not None:
            pending = {name for name in pending if all(
                fingerprint(case, other | change) == base for change in changes[name])}
    if pending:
        raise Difference(f"without effect: {', '.join(sorted(pending))}")
    if not n_keys:
        raise NotApplicable("the model has no keys")
    return f"each of {n_keys} changes something or is refused"


# -----------------------------------------------------------------------------
# the command

RUNS = dict(resume=check_resume, split=check_split, ddp=check_ddp, fsdp=check_fsdp)
EXAMINATIONS = dict(
    batches=check_batches, gradients=check_gradients, evaluation=check_evaluation,
    decoding=check_decoding, initial=check_initial, flops=check_flops, export=check_export,
    keys=check_keys)


@dataclass
class Settings:
    """Check that an edited repository keeps its promises for a model type."""
    only: list[str] = key([], "a check to run (default: all)", choices=[*RUNS, *EXAMINATIONS])


def print_result(name, result):
    """Print the line of a check, a function that returns the details; return whether it passed."""
    try:
        status, text = "ok", result()
    except NotApplicable as reason:
        status, text = "not applicable", reason
    except Exception as error:
        status = "differs"
        text = error if isinstance(error, Difference) else f"{type(error).__name__}: {error}"
    print(f"{status:14}  {name}: {' '.join(str(text).split())[:300]}", flush=True)
    return status != "differs"


def check(settings, config):
    """Run the checks of `config`, print a line for each, and return the exit code."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, FORK) as pool:
        case = Case(config, folder)
        with open(case.path("config.yaml"), "w") as f:
            f.write(to_yaml(config))
        try:
            train_in_process(case, "first")
        except (NotApplicable, Difference) as error:
            raise SetupError(f"the first run failed: {error}") from None
        names = settings.only or [*RUNS, *EXAMINATIONS]
        runs = {name: pool.submit(RUNS[name], case) for name in RUNS if name in names}
        passed = [print_result(name, future.result) for name, future in runs.items()]
        # With the shape of the weights from which the run started.
        case.config = load_config(case.path("first", "config.yaml"))
        with process_group(config) as ranks, contextlib.ExitStack() as stack:
            with contextlib.redirect_stdout(io.StringIO()):  # the start-up lines
                case.run = stack.enter_context(open_run(case.config, ranks))
            passed += [print_result(name, lambda work=work: work(case))
                       for name, work in EXAMINATIONS.items() if name in names]
        return 0 if all(passed) else 1


def load_small(argv):
    """Return the configuration of these arguments of run_train.py, for short runs on a CPU."""
    path = os.path.join(REPOSITORY, "train", "configs", f"{load_config(None, argv).model}.yaml")
    if not os.path.exists(path):
        path = os.path.join(REPOSITORY, "train", "config_test.yaml")
    config = load_config(path, argv)
    known = {f.name for f in fields(config)}
    return load_config(None, vars(config) | {k: v for k, v in SETTINGS.items() if k in known})


def main(argv=None):
    return run_command(Settings, check, argv, load=load_small)


if __name__ == "__main__":
    sys.exit(main())
