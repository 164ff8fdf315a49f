"""Check that a model type still works correctly after an edit of the code, in 15 to 60 s.

    python -m train.tools.check [--model NAME] [--config FILE] [--key value]...

Runs of 12 steps are compared with a first run: killed and resumed, with other micro-batches, on two
ranks with DDP and FSDP, with gradient checkpointing. Batches that depend on earlier ones are found
by the resumed run, initial values that depend on the device by FSDP. Then the model is examined:
gradients, evaluation, decoding, FLOPs, export, keys. Each check prints one line: ok, differs or not
applicable. The exit code is 1 if a check differs. Default of --config: train/config_test.yaml. The
runs are on the CPU, in float32, not compiled, without dropout; SETTINGS replaces batch size,
intervals etc.
"""

import contextlib
import copy
import io
import os
import re
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from model.convert import main as convert
from model.core import ops
from model.core.kv_cache import create_cache
from model.core.packed import replace_linear_layers
from model.gpt import GPT
from model.sample.compiled import compile_decoder
from train.base.checkpoint_file import load_checkpoint, save_checkpoint
from train.base.cli import command
from train.base.errors import ConfigError, DataError, SetupError, UserError, require
from train.base.fields import base_type, key
from train.base.keys import GPTKeys
from train.base.tensors import named_tensors
from train.config import load_config, to_yaml
from train.dataloader import seed_step
from train.distributed import process_group
from train.evaluate import evaluate
from train.options.loss_svg import read_metrics
from train.setup import open_data, open_run
from train.system import bind_before_step, hook, load_model_type
from train.train import train

# Small and quick; without dropout: the random numbers differ between ranks. dist_timeout: a run
# whose ranks wait for different tensors ends soon, e.g. under FSDP with blocks skipped at random.
SETTINGS = dict(
    batch_size=4, gradient_accumulation_steps=2, max_iters=12, lr_decay_iters=12, warmup_iters=2,
    max_epochs=None, eval_epochs=None, warmup_epochs=None, save_epochs=None, warmup_ratio=None,
    eval_interval=6, eval_iters=2, eval_tasks=[], save_interval=5, mirror=None, log_interval=1,
    early_stopping_patience=0, early_stopping_metric="val_loss", early_stopping_mode="min",
    sample_tokens=0, tracker=[], dropout=0.0, device="cpu", dtype="float32", compile="false",
    num_threads=1, dist_timeout=60)
KILLED_AT = 6
MAX_REASON_CHARS = 300
# Measurements, the perplexity, which is a function of the loss, and norms, which amplify rounding.
NOT_COMPARED = {"time_ms", "tokens_per_sec", "mfu", "memory_mib", "val_ppl", "grad_norm", "work_ms",
                "slowest_ms", "slowest_rank"}
TOLERANCE = 1e-4         # relative: sums in a different order
LOGIT_TOLERANCE = 1e-3
BFLOAT16_TOLERANCE = 0.1
LARGE_LOGIT = 100.0
SCORE_FACTOR = 30.0  # attention scores as large as those of a trained model
GRADIENT_TOLERANCE = 0.05
MIN_LOSS_CHANGE = 3e-5   # relative: smaller changes are rounding in float32
FLOPS_TOLERANCE = 0.15   # norms and softmax do not count as FLOPs
# Options of GPTs with which keys are tried again that have no effect without them.
OPTIONS = dict(qk_norm=True, layer_types="FW", window=4)
NO_EFFECT_ON_LOSS = {"max_positions", "bos_id", "pad_id", "eos_ids", "vocab_size", "block_size"}


class Case:
    """The model type and configuration under test, the argument of all checks.

    A check returns a text for the report. It raises AssertionError if it fails, SetupError if it is
    not applicable. folder: has a subfolder per training run; "first" is the run with which others
    are compared. run: set by check(): the first run, resumed as a Run, with changed weights.
    """

    def __init__(self, config, folder):
        self.config = config
        self.folder = Path(folder)

    def build(self, **changes):
        """Return (data, a new model) for the configuration of the first run with `changes`."""
        config = load_config(self.folder / "first" / "config.yaml", changes)
        data = open_data(config, self.run.ranks)
        return data, load_model_type(config.model).build_model(config, data)

    def loss(self, model, batch, seed=1, it=0):
        """Return model(*batch), (loss, sums {name: tensor}), after before_step(it) and seeding."""
        bind_before_step(model)(it)
        seed_step(seed, 0, self.run.ranks)
        return model(*batch)

    def tokens(self, rows):
        """Return fixed token ids (rows, T), T = min(24, block_size); an eighth are end of text."""
        c = self.run.raw_model.config
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(c.vocab_size, (rows, min(24, c.block_size)), generator=generator)
        return tokens.masked_fill(tokens % 8 == 0, self.run.data.spec.get("eot_token") or 0)


def compare(actual, expected, tolerance=0.0):
    """Raise AssertionError unless two numbers, tensors, or nested dicts or lists are equal.

    tolerance: relative and absolute; 0: exactly. NaN equals NaN; dtypes are not compared.
    """
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True,
                               check_dtype=False)


# -----------------------------------------------------------------------------
# runs

def train_rank(rank, config, environment, killed_at):
    """Train as one rank in this forked process; SIGKILL at step killed_at's evaluation, if set."""
    def on_evaluation(it, numbers):
        if it == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    train(config, on_evaluation=on_evaluation)


def train_in_process(case, name, ranks=1, killed_at=None, **changes):
    """Train a run in `ranks` new processes, in the folder case.folder / name, and wait for the end.

    changes: {key: value} in the configuration of `case`. killed_at: kill the processes at the
    evaluation of this step, which is no error; `None`: never. Raises SetupError if the run is
    refused (invalid input), AssertionError if it crashes or refuses to resume.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = dict(WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    changes["out_dir"] = str(case.folder / name)
    config = load_config(case.folder / "config.yaml", changes)
    try:
        mp.start_processes(train_rank, (config, environment, killed_at), ranks, start_method="fork")
    except mp.ProcessExitedException as error:
        if killed_at is None:
            raise AssertionError(str(error)) from None
    except mp.ProcessRaisedException as error:  # its text has the traceback of the process
        last = str(error).rpartition("\nTraceback")[2]  # not an error that was being handled
        refusal = re.search(r"\ntrain\.base\.errors\.\w+Error: (.*)", last, re.DOTALL)
        if refusal and "resume" not in changes:
            raise SetupError(refusal[1]) from None
        raise AssertionError(str(error)[-MAX_REASON_CHARS:]) from error


def read_log(case, name):
    """Return {"KEY of step N": number} from a run's metrics.jsonl, without keys in NOT_COMPARED."""
    return {f"{k} of step {record['iter']}": v
            for record in read_metrics(case.folder / name / "metrics.jsonl")
            for k, v in record.items() if isinstance(v, (int, float)) and k not in NOT_COMPARED}


def compare_run(case, name, **how):
    """Train a run with arguments of train_in_process(), and compare the log with the first run's.

    Raises AssertionError unless all numbers are equal up to rounding, or if the run warns that
    ranks differ; errors of train_in_process().
    """
    train_in_process(case, name, **how)
    expected = read_log(case, "first")
    log = (case.folder / name / "train.log").read_text()
    if drift := re.search("warning: .* differ between ranks.*", log):
        raise AssertionError(drift[0])
    compare(read_log(case, name), expected, TOLERANCE)
    return f"{len(expected)} numbers agree within rounding"


def check_resume(case):
    if case.run.data.val is None:
        raise SetupError("no validation data: the run is killed at an evaluation")
    train_in_process(case, "resumed", killed_at=KILLED_AT)
    train_in_process(case, "resumed", resume="must")
    states = [load_checkpoint(case.folder / name / "ckpt.pt") for name in ("resumed", "first")]
    # A difference: state outside the state_dict?
    compare(*(dict(named_tensors(state)) for state in states))
    compare(read_log(case, "resumed"), read_log(case, "first"))
    return f"killed at step {KILLED_AT}; weights, optimizer and log equal to the bit"


def check_weights(case):
    """Check that the weights in ckpt.pt of the first run have the validation loss in the log."""
    data, model = case.build()
    if data.val is None:
        raise SetupError("no validation data")
    model.load_state_dict(load_checkpoint(case.folder / "first" / "ckpt.pt")["model"])
    step = case.config.max_iters
    bind_before_step(model)(step - 1)
    numbers = evaluate(model.eval(), model, data.val, case.config.eval_iters, case.run.ranks,
                       contextlib.nullcontext)
    compare(numbers["val_loss"], read_log(case, "first")[f"val_loss of step {step}"], TOLERANCE)
    return "ckpt.pt has the logged validation loss"


# -----------------------------------------------------------------------------
# the model

@torch.no_grad()
def change_weights(model):
    """Add small fixed numbers to the trained parameters, in place, as zeros hide differences."""
    generator = torch.Generator().manual_seed(0)
    for p in (p for p in model.parameters() if p.requires_grad):
        p.add_(torch.randn(p.shape, generator=generator), alpha=0.02 if p.dim() > 1 else 0.1)


class FixedChoices(TorchFunctionMode):
    """Context manager that repeats the choices of torch.topk: others make the loss discontinuous.

    The n-th call in each pass of a model returns the current values at the indices that the n-th
    call in the first pass chose. n_used: number of calls in this pass; set it to 0 before each
    pass. Raises SetupError if the first call is made without gradients.
    """

    def __init__(self):
        super().__init__()
        self.choices = {}
        self.n_used = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def repeat(input, k, dim=-1, *_, **__):  # the signature of torch.topk
            return torch.return_types.topk((input.gather(dim, index), index))
        out = func(*args, **kwargs or {})
        if func not in (torch.topk, torch.Tensor.topk):
            return out
        if not (self.choices or torch.is_grad_enabled()):
            raise SetupError("topk without gradients makes a threshold: the loss is not smooth")
        self.n_used += 1
        index = self.choices.setdefault(self.n_used, out.indices)
        return repeat(*args, **kwargs or {})


def check_gradients(case):
    """Compare gradients of the loss with central differences, for one parameter of each kind.

    Names that differ only in digits are of one kind. The difference is in the direction of a random
    half of the gradient's elements. Raises AssertionError also if a trained parameter has no
    gradient, SetupError if the loss is too flat.
    """
    model = case.run.raw_model.train()
    batch = case.run.data.train.get_batch("cpu", 0)
    model.zero_grad()
    with FixedChoices() as fixed:
        loss = case.loss(model, batch)[0]
        loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if unused := [name for name, p in trained.items() if p.grad is None]:
        raise AssertionError(f"no gradient for {', '.join(unused[:4])}: not used in forward")
    kinds = {re.sub(r"\d", "", name): (name, p) for name, p in trained.items()}
    generator = torch.Generator().manual_seed(0)
    ratios = {}
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
        ratios[name] = (losses[0] - losses[1]) / (2 * step * slope)
    compare(ratios, dict.fromkeys(ratios, 1.0), GRADIENT_TOLERANCE)
    if not ratios:
        raise SetupError("the loss is too flat for finite differences")
    return f"{len(ratios)} of {len(kinds)} kinds of parameters agree with finite differences"


def check_loss(case):
    """Compare the three implementations of a GPT's loss, and the norms of the gradients.

    These are LinearCrossEntropy, whole_cross_entropy (here not compiled) and SampledCrossEntropy,
    with the entire vocabulary as the sample. In eval mode they, and the loss that the model returns
    for a batch (tokens, targets), are also compared with the cross-entropy of the logits, which are
    made large, as a cap has no effect on small ones. Raises SetupError if the model is not a GPT.
    """
    def differentiate(loss):
        model.zero_grad()
        loss.backward()
        return {name: p.grad.norm() for name, p in model.named_parameters()
                if p.grad is not None and p.grad.any()} | dict(loss=loss.detach())

    def of_logits(idx, targets):
        return differentiate(F.cross_entropy(
            model(idx).flatten(0, 1), targets.flatten(), ignore_index=ops.IGNORE))
    model = copy.deepcopy(case.run.raw_model).eval()
    if not isinstance(model, GPT):
        raise SetupError("not a GPT")
    head, n_ids = (model.lm_head or model.wte).weight, model.config.vocab_size
    tokens = case.tokens(rows=2)
    head.data.mul_(LARGE_LOGIT / model(tokens).detach().abs().max())
    batch = case.run.data.train.get_batch("cpu", 0)
    if len(batch) == 2:
        compare(differentiate(model(*batch)[0]), of_logits(*batch), LOGIT_TOLERANCE)
    idx, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, :3] = ops.IGNORE
    forms = ops.LinearCrossEntropy(), ops.SampledCrossEntropy(targets, n_ids, n_ids, seed=0)
    for mode in (False, True):
        losses = [form.train(mode)(model.trunk(idx), head, targets, n_ids) for form in forms]
        losses.append(ops.whole_cross_entropy(model.trunk(idx).flatten(0, 1), head,
                                              targets.flatten(), n_ids))
        results = [differentiate(x.sum() / (targets != ops.IGNORE).sum()) for x in losses]
        expected = results[0] if mode else of_logits(idx, targets)
        compare(results, [expected] * 3, LOGIT_TOLERANCE)
    return "that of the logits, with its gradients; equal in chunks, compiled and with head_samples"


def check_evaluation(case):
    data, model = case.build(dropout=0.5)
    batch = data.train.get_batch("cpu", 0)
    with torch.no_grad():
        compare(*(case.loss(model.eval(), batch, seed)[0] for seed in (1, 2)))
    return "no random numbers"


def check_decoding(case):
    """Compare the logits of a forward pass with those of every form of decoding.

    The forms: with a cache, in rows of equal and of different lengths; with
    replace_linear_layers(); with the code of --compile, not compiled; and with two answers packed
    into one row, as in GRPO, where columns are not positions. Different lengths, GRPO and --compile
    are left out if the model refuses them. Attention in bfloat16 is compared with float32. Raises
    SetupError if the model is not a GPT or refuses a cache.
    """
    def decode(model, *lengths):  # a prompt of this length for each row, then single tokens
        cache, logits = create_cache(model, len(lengths)), full.clone()
        for i, n in enumerate(lengths):
            logits[i:i + 1, :n] = model(idx[i:i + 1, :n], cache=cache[i:i + 1], last_only=False)
        for columns in torch.tensor(lengths) + torch.arange(T - max(lengths))[:, None]:
            place = torch.arange(len(lengths)), columns
            logits[place] = model(idx[place][:, None], cache=cache, last_only=False)[:, 0]
        return logits
    model = copy.deepcopy(case.run.raw_model).eval()
    if not isinstance(model, GPT):
        raise SetupError("not a GPT")
    # With small scores, an edit of them changes little.
    for p in (p for name, p in model.named_parameters() if name.endswith("attn.q.weight")):
        p.data.mul_(SCORE_FACTOR)
    idx = case.tokens(rows=2)
    T = idx.size(1)
    # Windows count places in a row.
    n = min(T, *(block.attn.window or T for block in model.h))
    part = (torch.arange(n)[None] // max(1, n // 3)).clamp(max=2)  # (1, n): a prompt, two answers
    idx[1, :n // 3] = idx[0, :n // 3]
    with torch.no_grad():
        full = model(idx)
        try:
            logits = {"cached": decode(model, T // 2, T // 2)}
        except ValueError as error:
            raise SetupError(f"refused: {error}") from None
        with contextlib.suppress(ValueError):  # an edit may refuse these
            logits["ragged rows"] = decode(model, T // 2, T // 4)
        with contextlib.suppress(ValueError):
            place = part // 2, torch.arange(n) - n // 3 * (part == 2)  # rows and columns of idx
            mask = ((part.mT == part) | (part == 0)).tril()[None, None]
            x = model.trunk(idx[place], None, mask, place[1], ops.histories(idx)[place])
            logits["rows of GRPO"] = full.index_put(place, model.logits(x))
        packed = replace_linear_layers(copy.deepcopy(model))
        logits |= {"packed": packed(idx), "packed, cached": decode(packed, T // 2)}
        # The code of --compile, not compiled; some models are refused.
        with torch.compiler.set_stance("force_eager"), contextlib.suppress(ValueError):
            logits["compiled"] = decode(compile_decoder(packed), T // 2)
    compare(logits, dict.fromkeys(logits, full), LOGIT_TOLERANCE)
    # One more form of attention scores in ops.py: that of bfloat16 on a CPU.
    qkv = 2 * torch.randn(3, 1, 1, T, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    compare(ops.attend(*qkv), ops.attend(*qkv.float()), BFLOAT16_TOLERANCE)
    return f"equal logits: {'; '.join(logits)}"


def check_flops(case):
    model = case.run.raw_model.train()
    loader = case.run.data.train
    batch = loader.get_batch("cpu", 0)
    expected = hook(model, "flops_per_unit")() * len(batch[0]) * loader.units_per_sample
    if not expected or hook(loader, "computes"):
        raise SetupError("no flops_per_unit(), or the loader computes too")
    # The counter does not know the fused attention of a CPU, and the products of experts.
    mapping = {torch.ops.aten._grouped_mm: lambda a, b, *_, **__: 2 * a.numel() * b[-1]}
    with (FlopCounterMode(display=False, custom_mapping=mapping) as counter,
          sdpa_kernel(SDPBackend.MATH)):
        case.loss(model, batch)[0].backward()
    ratio = counter.get_total_flops() / expected
    # A loader of rows has the FLOPs of the longest row.
    minimum = 0 if loader.unit == "row" else 1 - FLOPS_TOLERANCE
    if not minimum <= ratio <= 1 + FLOPS_TOLERANCE:
        raise AssertionError(f"PyTorch counts {ratio:.2f} of flops_per_unit()")
    return f"PyTorch counts {ratio:.2f} of it"


def check_export(case):
    export, checkpoint = (str(case.folder / name) for name in ("export", "changed.pt"))
    save_checkpoint(checkpoint, load_checkpoint(case.folder / "first" / "ckpt.pt")
                    | dict(model=case.run.raw_model.state_dict()))
    with contextlib.redirect_stderr(io.StringIO()) as message:
        if convert(["--ckpt", checkpoint, "--to", export]):
            return f"refused: {message.getvalue()}"
    transformers = require("transformers", "this check")
    idx = case.tokens(rows=1)
    other = transformers.AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = case.run.raw_model.eval()(idx)
        compare(other(idx).logits[..., :logits.size(-1)], logits, LOGIT_TOLERANCE)
    return f"{type(other).__name__} has equal logits"


# -----------------------------------------------------------------------------
# keys

def candidates(field, value):
    """Return values other than `value` to try for a configuration key; some may be invalid."""
    kind = base_type(field.type)
    values = field.metadata.get("choices", (False, True) if kind is bool else ())
    if kind is int:
        values = ((value or 2) * 2, (value or 2) // 2, 1, 4)
    elif kind is float:
        values = ((value or 0.25) * 2, (value or 0.5) / 2)
    return [v for v in values if v != value]


def fingerprint(case, changes):
    """Return a list that differs if `changes` {key: value} have an effect; `None` if refused.

    It has the FLOPs, the number of parameter tensors, and from two steps the batches, losses, sums
    of the model and sums of the gradients. Raises AssertionError after any other error.
    """
    try:
        data, model = case.build(**changes)
        results = [hook(model, "flops_per_unit")(), len(list(model.parameters()))]
        for it in (0, 7):  # later batches depend on buffers
            batch = data.train.get_batch("cpu", it)
            loss, sums = case.loss(model.train(), batch, it=it)
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
        raise AssertionError(f"{changes}: {type(error).__name__}: {error}") from error


def check_keys(case):
    """Check that each configuration key of the model has an effect on fingerprint().

    A key is set to other values, alone, with OPTIONS, or with a change of one more key. A refused
    value is an effect. NO_EFFECT_ON_LOSS is left out. AssertionError names keys without effect.
    """
    c = case.config
    own = fields(load_model_type(c.model).Keys or CheckOptions)
    inherits = c.init_from != "scratch" or getattr(c, "backbone", "")
    shared = fields(GPTKeys) if isinstance(case.run.raw_model, GPT) and not inherits else ()
    changes = {f.name: [{f.name: v} for v in values] for f in (*own, *shared)
               if hasattr(c, f.name) and c.replace(**OPTIONS).has_effect(f)
               and f.name not in NO_EFFECT_ON_LOSS
               and (values := candidates(f, getattr(c, f.name)))}
    pending = set(changes)
    for other in [{}, OPTIONS, *(change for f in own for change in changes.get(f.name, ()))]:
        base = fingerprint(case, other) if pending else None
        if base is not None:
            pending = {name for name in pending if all(
                fingerprint(case, other | change) == base for change in changes[name])}
    if pending:
        raise AssertionError(f"without effect: {', '.join(sorted(pending))}")
    return f"each of {len(changes)} changes something or is refused"


# -----------------------------------------------------------------------------
# the command

CHECKS = dict(
    resume=check_resume,
    split=partial(compare_run, name="split", batch_size=2, gradient_accumulation_steps=4,
                  eval_iters=4),
    ddp=partial(compare_run, name="ddp", ranks=2, distributed="ddp"),
    fsdp=partial(compare_run, name="fsdp", ranks=2, distributed="fsdp"),
    recompute=partial(compare_run, name="recompute", gradient_checkpointing="true"),
    weights=check_weights, gradients=check_gradients, loss=check_loss,
    evaluation=check_evaluation, decoding=check_decoding, flops=check_flops, export=check_export,
    keys=check_keys)


@dataclass
class CheckOptions:
    """Check that a model type still works correctly after an edit of the code."""
    only: list[str] = key([], "a check to run (default: all)", choices=list(CHECKS))


def print_result(case, name):
    """Run the check `name` of CHECKS, print one line, and return False if it differs."""
    try:
        status, text = "ok", CHECKS[name](case)
    except (ConfigError, DataError, SetupError) as reason:  # or a refused run
        status, text = "not applicable", reason
    except Exception as error:
        status, text = "differs", f"{type(error).__name__}: {error}"
    # Not sys.stdout, which is redirected.
    reason = " ".join(str(text).removeprefix("AssertionError: ").split())[:MAX_REASON_CHARS]
    print(f"{status:14}  {name}: {reason}", file=sys.__stdout__, flush=True)
    return status != "differs"


def check(settings, config):
    """Train a first run in a temporary folder, check the model type, and print a line per check.

    settings.only: the checks to run, keys of CHECKS ([]: all). Return the exit code: 1 if a check
    differs or fails with an unexpected exception, otherwise 0. Raises SetupError if the first run
    is refused, AssertionError if it crashes.
    """
    with (tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()),
          contextlib.redirect_stderr(io.StringIO())):  # also of the processes
        case = Case(config, folder)
        (case.folder / "config.yaml").write_text(to_yaml(config))
        train_in_process(case, "first")
        # With the shape of the weights from which the run started.
        case.config = load_config(case.folder / "first" / "config.yaml")
        with process_group(config) as ranks, open_run(case.config, ranks) as case.run:
            case.run.before_step(0)
            change_weights(case.run.raw_model)
            return 0 if all([print_result(case, name) for name in settings.only or CHECKS]) else 1


def load_small(argv):
    """Return the TrainConfig of `argv` (default: train/config_test.yaml) changed by SETTINGS."""
    return load_config(None, vars(load_config("train/config_test.yaml", argv)) | SETTINGS)


main = command(CheckOptions, check, load=load_small)
