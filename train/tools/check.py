"""Check that an edited repository keeps its promises for a model type, in about a minute.

    python -m train.tools.check [--model NAME] [--config FILE] [--key value]...

Runs of 12 steps are compared: one that is killed and resumed, on two ranks (DDP and FSDP), with
another split into micro-batches. Then the model is examined: batches, gradients, dropout, decoding,
initial values, FLOPs, keys, export. Each check prints one line: ok, differs, or not applicable.
The exit code is 1 if a check differs. The default of --config is train/configs/NAME.yaml, or
train/config_test.yaml.
"""

import contextlib
import copy
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from train.base.checkpoint_file import load_checkpoint, named_tensors
from train.base.cli import run_command, take_flag
from train.base.errors import SetupError, UserError
from train.base.fields import base_type
from train.config import load_config, take_config, to_yaml
from train.device import seed_step
from train.distributed import process_group
from train.keys import GPTKeys
from train.setup import open_data, open_run
from train.system import REPOSITORY, hook, load_model_type

# Small and quick; without dropout, whose random numbers differ between ranks.
SETTINGS = dict(
    batch_size=4, gradient_accumulation_steps=2, max_iters=12, max_epochs=None, max_minutes=None,
    eval_interval=6, eval_epochs=None, eval_iters=2, eval_tasks=[], save_interval=4,
    save_epochs=None, log_interval=1, warmup_iters=2, warmup_ratio=None, warmup_epochs=None,
    lr_decay_iters=12, early_stopping_patience=0, sample_tokens=0, tracker=[], dropout=0.0,
    device="cpu", dtype="float32", compile="false", num_threads=1)
KILLED_AT = 6
MEASUREMENTS = {"time_ms", "tokens_per_sec", "mfu", "memory_mib"}  # in log lines, never equal
TOLERANCE = 1e-4         # relative: sums in another order
NORM_TOLERANCE = 1e-2    # of gradient norms, which amplify rounding
LOGIT_TOLERANCE = 1e-3
INT8_TOLERANCE = 0.1
GRADIENT_TOLERANCE = 0.1
MIN_LOSS_CHANGE = 3e-5   # relative: smaller changes are rounding in float32
FLOPS_TOLERANCE = 0.15   # norms and softmax do not count as FLOPs
# Keys that only matter together with others are tried again with these.
OPTIONS = dict(qk_norm=True, layer_types="FW", window=4)
FOR_EXPORTS = {"max_positions", "bos_id", "eos_ids"}
GIVEN_BY_DATA = {"vocab_size", "block_size"}


class Difference(Exception):
    """A check that failed; the text says where and by how much."""


class NotApplicable(Exception):
    """A check that is impossible for this model; the text is the reason."""


@dataclass
class Case:
    """What is checked: the small configuration, the folder of the runs, the Run after run 1."""
    config: object
    folder: str
    run: object = None

    def path(self, name):
        return os.path.join(self.folder, name)


# -----------------------------------------------------------------------------
# runs

def train_in_process(case, name, *args, ranks=1, kill_at=None):
    """Run run_train.py into folder `name` and return it. kill_at: kill the process when it logs
    this step. Raises NotApplicable for a refusal, Difference for a crash."""
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}",
                "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    command = [sys.executable, *(launcher if ranks > 1 else []), "run_train.py", "--config",
               case.path("config.yaml"), "--out_dir", case.path(name), *args]
    process = subprocess.Popen(command, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if kill_at is not None and line.startswith(f"iter {kill_at}:"):
            process.kill()
    code = process.wait()
    messages = [line.strip() for line in lines if line.strip()]
    if code == 2 or (ranks > 1 and code and not any("Traceback" in m for m in messages)):
        raise NotApplicable(f"refused: {' '.join(messages[-3:])}")
    if code and kill_at is None:
        raise Difference(f"exit code {code}: {' '.join(messages[-2:])}")
    return case.path(name)


def free_port():
    """Return a port of this machine that no process uses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def read_log(folder):
    """Return {(step, name): number} of metrics.jsonl, without measurements of time and memory."""
    numbers = {}
    with open(os.path.join(folder, "metrics.jsonl")) as f:
        for record in map(json.loads, f):
            for name, value in record.items():  # val_ppl is a function of val_loss
                if isinstance(value, (int, float)) and name not in MEASUREMENTS | {"val_ppl"}:
                    numbers[record["iter"], name] = value
    return numbers


def compare_logs(case, name):
    """Compare the logged numbers of a run with those of run 1, up to rounding."""
    expected, numbers = read_log(case.path("1")), read_log(case.path(name))
    if missing := expected.keys() ^ numbers.keys():
        raise Difference(f"only one run logged {sorted(missing)[0]}")
    errors = {at: abs(numbers[at] - x) / max(1.0, abs(x)) for at, x in expected.items()}
    for (step, name), error in errors.items():
        if not error <= (NORM_TOLERANCE if name == "grad_norm" else TOLERANCE):
            raise Difference(f"{name} of step {step}: {numbers[step, name]:.6g} instead of "
                             f"{expected[step, name]:.6g}")
    return f"largest relative difference of {len(errors)} numbers {max(errors.values()):.1e}"


def check_resume(case):
    try:
        train_in_process(case, "resumed", kill_at=KILLED_AT)
        train_in_process(case, "resumed", "--resume", "must")
    except NotApplicable as error:
        raise Difference(error) from None
    a, b = (load_checkpoint(os.path.join(case.path(n), "ckpt.pt")) for n in ("1", "resumed"))
    for part in ("model", "optimizer"):
        expected, tensors = dict(named_tensors(a[part])), dict(named_tensors(b[part]))
        if expected.keys() != tensors.keys():
            raise Difference(f"{part}: {sorted(expected.keys() ^ tensors.keys())[0]} is missing")
        for name, tensor in expected.items():
            if not torch.equal(tensor, tensors[name]):
                raise Difference(f"{part}: {name} after a resume; does the model keep state "
                                 "outside its state_dict?")
    expected, numbers = read_log(case.path("1")), read_log(case.path("resumed"))
    if changed := [key for key in expected.keys() | numbers if
                   expected.get(key) != numbers.get(key)]:
        raise Difference(f"{min(changed)[1]} of step {min(changed)[0]}")
    return f"killed at step {KILLED_AT}; weights, optimizer and log equal to the bit"


def check_split(case):
    train_in_process(case, "split", "--batch_size", "2", "--gradient_accumulation_steps", "4",
                     "--eval_iters", "4")
    return compare_logs(case, "split")


def check_ddp(case):
    train_in_process(case, "ddp", ranks=2)
    return compare_logs(case, "ddp")


def check_fsdp(case):
    train_in_process(case, "fsdp", "--distributed", "fsdp", ranks=2)
    return compare_logs(case, "fsdp")


# -----------------------------------------------------------------------------
# the model

def build(case, **changes):
    """Return (data, model) of the configuration with `changes`, with initial values."""
    config = load_config(os.path.join(case.path("1"), "config.yaml"), changes)
    data = open_data(config, case.run.ranks)
    return data, load_model_type(config.model).build_model(config, data)


def compute_loss(case, model, batch, seed=1):
    """Return (loss, sums) of a batch, with random numbers that `seed` determines."""
    seed_step(seed, 0, case.run.ranks)
    return model(*batch)


def first_batch(case, data=None):
    return (data or case.run.data).train.get_batch("cpu", 0)


def check_batches(case):
    loader = case.run.data.train
    first = loader.get_batch("cpu", 5)
    loader.get_batch("cpu", 2)
    again = loader.get_batch("cpu", 5)
    if not all(map(torch.equal, first, again)):
        raise Difference("the batch of step 5 changes when it is requested again")
    if case.run.data.val is None:
        return "a function of the step"
    a, b = (case.run.data.val.fixed_batch(0, 2, torch.device("cpu")) for _ in range(2))
    if not all(map(torch.equal, a, b)):
        raise Difference("the first validation batch changes when it is requested again")
    return "a function of the step; validation batches are fixed"


class FixedChoices(TorchFunctionMode):
    """Context in which topk repeats its choices of the first pass: with other choices the loss
    would jump. Call restart() before each pass."""

    def __init__(self):
        super().__init__()
        self.choices = []
        self.restart()

    def restart(self):
        self.n_used = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if func in (torch.topk, torch.Tensor.topk):
            self.n_used += 1
            if self.n_used > len(self.choices):
                self.choices.append(out.indices)
            index = self.choices[self.n_used - 1]
            return torch.return_types.topk((args[0].gather(-1, index), index))
        return out


def check_gradients(case):
    """Compare the derivative of the loss along parts of the gradient with central differences."""
    model = case.run.raw_model.train()
    batch = first_batch(case)
    model.zero_grad()
    with FixedChoices() as fixed:
        loss, _ = compute_loss(case, model, batch)
        loss.backward()
    kinds = {}
    for name, p in model.named_parameters():
        if p.grad is not None and float(p.grad.norm()) > 1e-6:
            kinds.setdefault(".".join(part for part in name.split(".") if not part.isdigit()),
                             (name, p))
    generator = torch.Generator().manual_seed(0)
    checked = []
    for name, p in kinds.values():
        keep = torch.rand(p.shape, generator=generator) < 0.5
        direction = p.grad * keep / (p.grad * keep).norm().clamp(min=1e-12)
        slope = float((p.grad * direction).sum())
        step = min(2e-3 / max(slope, 1e-9), 0.02 * float(p.detach().norm().clamp(min=0.1)))
        if slope * step < MIN_LOSS_CHANGE * max(1.0, abs(loss.item())):
            continue
        losses = []
        with torch.no_grad(), fixed:
            for sign in (1, -2, 1):  # the last one restores the parameter
                p.add_(direction, alpha=sign * step)
                fixed.restart()
                losses.append(compute_loss(case, model, batch)[0].double().item())
        difference = (losses[0] - losses[1]) / (2 * step)
        if abs(difference - slope) > GRADIENT_TOLERANCE * abs(slope):
            raise Difference(f"{name}: {slope:.4g}, by finite differences {difference:.4g}")
        checked.append(name)
    model.zero_grad()
    return f"{len(checked)} parameters agree with finite differences"


def check_evaluation(case):
    if not hasattr(case.config, "dropout"):
        raise NotApplicable("no dropout")
    data, model = build(case, dropout=0.5)
    model.eval()
    with torch.no_grad():
        batch = first_batch(case, data)
        a, b = (compute_loss(case, model, batch, seed)[0] for seed in (1, 2))
    if not torch.equal(a, b):
        raise Difference(f"two losses of a batch in eval mode: {a.item():.6g}, {b.item():.6g}")
    return "no random numbers in eval mode"


def check_decoding(case):
    from model.core.kv_cache import create_cache
    from model.gpt import GPT
    from model.sample.fused import pack_model, quantize_model
    model = case.run.raw_model.eval()
    if not isinstance(model, GPT):
        raise NotApplicable("not a GPT")
    T = min(24, model.config.block_size)
    idx = torch.randint(model.config.vocab_size, (2, T), generator=torch.Generator().manual_seed(0))
    def cached(model):
        cache = create_cache(model, len(idx))
        parts = [idx[:, :T // 2], *idx[:, T // 2:].split(1, 1)]
        return torch.cat([model(part, cache=cache) for part in parts], dim=1)
    errors = {}
    with torch.no_grad():
        full = model(idx)
        packed = pack_model(copy.deepcopy(model))
        errors["cached"] = cached(model) - full
        errors["packed"] = packed(idx) - full
        errors["packed and cached"] = cached(packed) - full
        rounding = (quantize_model(copy.deepcopy(model))(idx) - full).abs().mean() / full.std()
    for name, error in errors.items():
        if not float(error.abs().max()) <= LOGIT_TOLERANCE * float(full.abs().max().clamp(min=1)):
            raise Difference(f"{name} logits differ by {error.abs().max().item():.2g}")
    if not rounding <= INT8_TOLERANCE:
        raise Difference(f"int8 logits differ by {rounding:.2g} standard deviations")
    return f"equal logits: {', '.join(errors)}; int8 within {rounding:.1e} standard deviations"


def check_initial(case):
    """Compare initial(), which fills a sharded model, with the values of a new model."""
    _, model = build(case)
    initial = hook(model, "initial")
    values = {name: (initial(name, t.shape, case.config.seed), t)
              for name, t in model.state_dict().items()}
    if all(value is None for value, _ in values.values()):
        raise NotApplicable("no initial(): FSDP is refused")
    for name, (value, tensor) in values.items():
        if value is not None and not torch.equal(value.to(tensor.dtype), tensor):
            raise Difference(f"{name}: initial() gives another value than a new model has")
    return f"{sum(v is not None for v, _ in values.values())} tensors by initial()"


def check_flops(case):
    model = case.run.raw_model.train()
    batch = first_batch(case)
    loader = case.run.data.train
    if hook(loader, "computes"):
        raise NotApplicable("the loader computes too")
    expected = hook(model, "flops_per_unit")() * len(batch[0]) * loader.units_per_sample
    if not expected:
        raise NotApplicable("no flops_per_unit()")
    # The counter does not know the fused attention of a CPU.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        compute_loss(case, model, batch)[0].backward()
    model.zero_grad()
    ratio = expected / max(1, counter.get_total_flops())
    if abs(ratio - 1) > FLOPS_TOLERANCE:
        raise Difference(f"{expected:.3g} per micro-batch, by PyTorch's counter "
                         f"{counter.get_total_flops():.3g}")
    return f"{ratio:.2f} of PyTorch's counter"


def check_export(case):
    to = case.path("export")
    process = subprocess.run(
        [sys.executable, "-m", "model.convert", "--ckpt", os.path.join(case.path("1"), "ckpt.pt"),
         "--to", to], cwd=REPOSITORY, text=True, capture_output=True)
    message = (process.stderr.strip() or process.stdout.strip() or " ").splitlines()[-1]
    if process.returncode == 2:
        return f"refused: {message}"
    if process.returncode:
        raise Difference(f"exit code {process.returncode}: {message}")
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise NotApplicable("transformers is not installed") from None
    model = case.run.raw_model.eval()
    idx = torch.randint(model.config.vocab_size, (1, min(24, model.config.block_size)),
                        generator=torch.Generator().manual_seed(0))
    other = AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(idx)
        error = (other(idx).logits[..., :logits.size(-1)] - logits).abs().max().item()
    if not error <= LOGIT_TOLERANCE * float(logits.abs().max().clamp(min=1)):
        raise Difference(f"the logits of transformers differ by {error:.2g}")
    return f"{type(other).__name__}: logits differ by {error:.1e}"


# -----------------------------------------------------------------------------
# keys

def candidates(field, value):
    """Yield other values of a configuration key, as far as they can be guessed."""
    kind = base_type(field.type)
    if "choices" in field.metadata:
        yield from (v for v in field.metadata["choices"] if v != value)
    elif kind is bool:
        yield not value
    elif kind is int:
        yield from (v for v in ((value or 2) * 2, (value or 2) // 2, 1, 4) if v != value)
    elif kind is float:
        yield from (v for v in ((value or 0.25) * 2, (value or 0.5) / 2) if v != value)


def fingerprint(case, changes):
    """Return what a configuration results in after two steps of gradient descent: losses, sums,
    gradients, batches, FLOPs. None if it is refused."""
    try:
        data, model = build(case, **changes)
        model.train()
        results = [hook(model, "flops_per_unit")(), getattr(model, "config", None)]
        for it in (0, 7):  # the second batch depends on buffers
            batch = data.train.get_batch("cpu", it)
            loss, sums = compute_loss(case, model, batch)
            loss.backward()
            results += [loss.item(), {n: s.tolist() for n, s in sums.items()}]
            results += [t.tolist() for t in batch]
            for p in model.parameters():
                if p.grad is not None:
                    results.append(p.grad.double().sum().item())
                    p.data.sub_(p.grad, alpha=0.1)
                    p.grad = None
            count = sums.get("count", torch.tensor(len(batch[0])))
            hook(model, "after_step")(it, sums | dict(count=count))
        results[1] = getattr(results[1], "rolls", None)
        return results
    except (UserError, ValueError):
        return None
    except Exception as error:
        raise Difference(f"{changes}: {type(error).__name__}: {error}") from error


def check_keys(case):
    """Set each key of the model to other values, alone and together with other keys."""
    c = case.config
    own = list(fields(load_model_type(c.model).Keys or Case))
    shape = getattr(case.run.raw_model, "config", None)
    inherits = c.init_from != "scratch" or getattr(c, "backbone", "")
    shared = [f for f in fields(GPTKeys) if is_dataclass(shape) and hasattr(shape, f.name)]
    keys = {f.name: [{f.name: v} for v in candidates(f, getattr(c, f.name))]
            for f in own + ([] if inherits else shared)
            if hasattr(c, f.name) and f.name not in FOR_EXPORTS | GIVEN_BY_DATA}
    keys = {name: changes for name, changes in keys.items() if changes}
    if not keys:
        raise NotApplicable("no keys of the model")
    others = [{}] + [OPTIONS] * bool(shared) + [
        change for f in own for change in keys.get(f.name, ())]
    without_effect = set(keys)
    for other in others:
        base = fingerprint(case, other)
        if base is not None:
            without_effect = {name for name in without_effect if all(
                fingerprint(case, other | change) == base for change in keys[name])}
        if not without_effect:
            return f"each of {len(keys)} changes something or is refused"
    raise Difference(f"without effect: {', '.join(sorted(without_effect))}")


# -----------------------------------------------------------------------------
# the command

RUNS: dict[str, Callable[[Case], str]] = {
    "resume": check_resume, "split": check_split, "ddp": check_ddp, "fsdp": check_fsdp}
EXAMINATIONS: dict[str, Callable[[Case], str]] = {
    "batches": check_batches, "gradients": check_gradients, "evaluation": check_evaluation,
    "decoding": check_decoding, "initial": check_initial, "flops": check_flops,
    "export": check_export, "keys": check_keys}


def report(name, result):
    """Print the line of a check, a function that returns the details; return whether it passed."""
    try:
        status, text = "ok", result()
    except NotApplicable as reason:
        status, text = "not applicable", str(reason)
    except Difference as difference:
        status, text = "differs", str(difference)
    except Exception as error:
        status, text = "differs", f"{type(error).__name__}: {error}"
    print(f"{status:14}  {name}: {' '.join(text.split())[:300]}", flush=True)
    return status != "differs"


def check(options, config):
    """Run all checks of `config`, print a line for each, and return the exit code."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        case = Case(config, folder)
        with open(case.path("config.yaml"), "w") as f:
            f.write(to_yaml(config))
        try:
            train_in_process(case, "1")
        except (NotApplicable, Difference) as error:
            raise SetupError(f"the first run failed: {error}") from None
        # With the shape of the weights that the run started from.
        case.config = config = load_config(os.path.join(case.path("1"), "config.yaml"))
        runs = {name: pool.submit(work, case) for name, work in RUNS.items()}
        passed = [report(name, future.result) for name, future in runs.items()]
        output = io.StringIO()
        with process_group(config) as ranks, contextlib.ExitStack() as stack:
            with contextlib.redirect_stdout(output):  # the start-up lines
                case.run = stack.enter_context(
                    open_run(config, ranks))
            passed += [report(name, lambda work=work: work(case))
                       for name, work in EXAMINATIONS.items()]
        return 0 if all(passed) else 1


def load_small(argv):
    """Return the configuration of these arguments of run_train.py, for short runs on a CPU."""
    has_config, _ = take_flag([a.partition("=")[0] for a in argv], "--config")
    path, overrides = take_config(argv)
    if not has_config:
        name = load_config(None, overrides).model
        path = os.path.join(REPOSITORY, "train", "configs", f"{name}.yaml")
        if not os.path.exists(path):
            path = os.path.join(REPOSITORY, "train", "config_test.yaml")
    config = load_config(path, overrides)
    known = {f.name for f in fields(config)}
    return load_config(None, vars(config) | {k: v for k, v in SETTINGS.items() if k in known})


@dataclass
class CheckOptions:
    """Check that an edited repository keeps its promises for a model type."""


def main(argv=None):
    return run_command(CheckOptions, check, argv, load=load_small)


if __name__ == "__main__":
    sys.exit(main())
