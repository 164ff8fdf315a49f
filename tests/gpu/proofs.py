"""Determine without a GPU what our code does on one, from what PyTorch and its compiler generate:

    python tests/gpu/proofs.py FOLDER H100 "step gpt2 2" whole

prints a JSON line per question: [the question, its answer, the error or null]. A question is the
name of a function of this file, with its arguments. FOLDER has the library of fake_cuda.py,
compiled with build(). Imports take seconds, so one process answers many questions.
"""

import functools
import gc
import json
import pathlib
import re
import sys
import traceback
import types

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import fake_cuda  # noqa: E402

GPT2 = dict(n_head=12, n_embd=768, n_hidden=3072, vocab_size=50257, block_size=1024, norm="layer",
            pos="learned", mlp="gelu_exact")
PRODUCTION = dict(n_head=6, n_embd=384, n_hidden=1536, vocab_size=32000, block_size=512)
SHAPES = {  # name: (the model's file, its shape, sequences in a micro-batch)
    "gpt2": ("gpt", GPT2, 32),
    "production": ("gpt", PRODUCTION, 16),
    "experts": ("moe", PRODUCTION, 16),
    "chat": ("chat", PRODUCTION | dict(n_kv_head=2), 16),
    "lora": ("lora", GPT2, 32)}


def build(name, n_layer):
    """Return (model on the meta device, batch) of the system `name` in SHAPES, with n_layer layers.
    To be called in a FakeTensorMode."""
    import torch

    from model import chat, gpt, lora, moe
    file, shape, B = SHAPES[name]
    shape, T = dict(shape, n_layer=n_layer), shape["block_size"]
    with torch.device("meta"):
        if file == "lora":
            config = gpt.GPTConfig(**shape)
            model = lora.LoRA(config, 1, None, gpt.GPT(config).state_dict(), 8, 16.0,
                              ["attn", "mlp"])
        else:
            config = (moe.MoEConfig if file == "moe" else gpt.GPTConfig)(**shape)
            model = dict(gpt=gpt.GPT, moe=moe.MoE, chat=chat.ChatGPT)[file](config)
    n, length = (3, T + 1) if file == "chat" else (2, T)
    return model, [torch.zeros(B, length, dtype=torch.int64, device="cuda:0") for _ in range(n)]


@functools.cache
def compile_step(name, n_layer):
    """Compile the forward and the backward pass of the system `name` in SHAPES; return the list of
    graphs (see capture() in fake_cuda.py)."""
    import torch
    fake_cuda.GRAPHS.clear()
    torch._dynamo.reset()
    with fake_cuda.fake_tensors():
        model, batch = build(name, n_layer)
        fake_cuda.to_device(model).compile(dynamic=False, fullgraph=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss, _ = model(*batch)
        loss.backward()
    return list(fake_cuda.GRAPHS)


# -----------------------------------------------------------------------------
# reading graphs

def sources(graph):
    """Return {name: source code} of the Triton kernels of a graph."""
    return dict(re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", graph.source, re.S))


def launches(graph):
    """Return the numbers of kernel launches of a graph: (of Triton's kernels, of library
    kernels)."""
    return (len(re.findall(r"triton_\w+\.run\(", graph.source)),
            len(re.findall(r"(?:extern_kernels\.\w+|torch\.ops\.aten\.[\w.]+)\(", graph.source)))


def largest_float32(graph):
    """Return the number of elements of the largest float32 buffer that a graph allocates."""
    found = re.findall(r"empty_strided_cuda\(\(([\d, ]*)\), \([\d, ]*\), torch\.float32\)",
                       graph.source)
    return max([prod(int(n) for n in shape.split(",") if n.strip()) for shape in found], default=0)


def prod(numbers):
    result = 1
    for n in numbers:
        result *= n
    return result


def saved_bytes(graph):
    """Return the bytes of the tensors that a forward graph allocates and returns (above all those
    that it saves for the backward pass); views are counted once, inputs not."""
    inputs = graph.module.graph.find_nodes(op="placeholder")
    storage = lambda n: n.meta["val"].untyped_storage()  # noqa: E731
    tensors = [n for n in (*inputs, *graph.outputs) if hasattr(getattr(n, "meta", {}).get("val"),
                                                               "untyped_storage")]
    given = {storage(n)._cdata for n in tensors if n in inputs}
    return sum({storage(n)._cdata: storage(n).nbytes() for n in tensors
                if storage(n)._cdata not in given}.values())


def flops(graph, of=""):
    """Return the FLOPs of the matrix products and attention of a graph, as torch.utils.flop_counter
    counts them: without a causal mask. of: count only operations with this text in their name."""
    import torch
    from torch.utils.flop_counter import flop_registry
    total = 0
    for node in graph.module.graph.nodes:
        count = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if count and of in str(node.target):
            args, kwargs = torch.utils._pytree.tree_map_only(
                torch.fx.Node, lambda n: n.meta["val"], (node.args, dict(node.kwargs)))
            total += count(*args, **kwargs, out_val=node.meta["val"])
    return total


def compile_kernels(graphs):
    """Compile each different Triton kernel of `graphs`, in the first of its configurations, to a
    cubin. Return the number of kernels. Raises an error if one does not compile."""
    from torch._inductor.codecache import PyCodeCache
    found = {body: name for graph in graphs for name, body in sources(graph).items()}
    for body, name in found.items():
        kernel = getattr(PyCodeCache.load(body), name)
        kernel.configs = kernel.configs[:1]
        kernel.precompile(warm_cache_only=True)
        result, = kernel.compile_results
        if "cubin" not in result.kernel.asm:
            raise RuntimeError(f"{name}: no cubin, but {list(result.kernel.asm)}")
    return len(found)


# -----------------------------------------------------------------------------
# the questions

def numbers(graphs):
    triton, library = map(sum, zip(*map(launches, graphs)))
    return dict(graphs=len(graphs), triton=triton, library=library,
                bytes=sum(g.bytes for g in graphs), saved=saved_bytes(graphs[0]),
                fused=sum(g.fused for g in graphs), flops=sum(map(flops, graphs)),
                attention=sum(flops(g, "attention") for g in graphs),
                float32=max(map(largest_float32, graphs)))


def step(name, n_layer):
    """Question: return the numbers() of a training step of the system `name` in SHAPES, with
    n_layer layers."""
    return numbers(compile_step(name, int(n_layer)))


def kernels(name):
    """Question: compile all Triton kernels of a training step of two layers; return their
    number."""
    return compile_kernels(compile_step(name, 2))


def attention_kernels():
    """Question: return {case, e.g. "GQA, mask": [names of attention operations]} that attend()
    calls in bfloat16, forward."""
    import torch

    from model.core.ops import attend
    found = {}
    with fake_cuda.fake_tensors():
        for heads, name in ((6, "MHA"), (2, "GQA")):
            q, k = (torch.zeros(2, n, 512, 64, dtype=torch.bfloat16, device="cuda:0",
                                requires_grad=True) for n in (6, heads))
            mask = torch.ones(2, 1, 512, 512, dtype=torch.bool, device="cuda:0")
            for how in (None, mask):
                calls = operations_in(lambda q=q, k=k, how=how: attend(q, k, k, mask=how))
                found[name + ("" if how is None else ", mask")] = [c for c in calls if "_dot" in c]
    return found


def operations_in(work):
    """Return the list of names of the ATen operations that work() calls, after decomposition by
    autograd."""
    import torch
    found = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            found.append(f.overloadpacket.__name__)
            return f(*args, **(kwargs or {}))
    with Watch():
        work()
    return found


SMALL = dict(n_layer=1, n_head=4, n_kv_head=2, n_embd=64, n_hidden=128, vocab_size=256,
             block_size=32)
SYSTEMS = ("gpt", "chat", "lora", "dpo", "grpo", "distill", "moe", "memory", "classifier", "sae",
           "autoencoder")


def small_model(name):
    """Return (model on the meta device, shapes of its training batch) of the system `name` in
    SYSTEMS. A shape that ends with `float` is that of a float tensor; others are int64."""
    import torch

    from model import autoencoder, chat, classifier, distill, dpo, gpt, grpo, lora, memory, moe, sae
    from train.config import load_config
    # The keys of these cannot do without a file.
    keys = {} if name in ("distill", "dpo", "grpo", "memory") else dict(model=name)
    config, B, T = load_config(None, keys), 4, 32
    shape = gpt.GPTConfig(**SMALL)
    with torch.device("meta"):
        if name == "gpt":
            return gpt.GPT(shape), [(B, T)] * 2
        if name == "chat":
            return chat.ChatGPT(shape), [(B, T + 1)] * 3
        if name == "dpo":
            model = dpo.PreferenceGPT(shape)
            model.keys = types.SimpleNamespace(dpo_beta=0.1, dpo_nll=1.0)
            return model, [(B, 2, T + 1)] * 2 + [(B, 2, float)]
        if name == "grpo":
            class Learner(grpo.PolicyGPT):
                """The part of a GRPO step on the GPU: the loss of given answers. Sampling and
                rewarding them involves texts, which the CPU computes."""
                def forward(self, tokens, weights, count):
                    return self.policy_loss(tokens, weights, count[0]), {}
            return Learner(shape), [(B, T, 5), (B, T, float), (1, float)]
        if name == "distill":
            model = distill.Student(shape)
            model.frozen = (gpt.GPT(shape).requires_grad_(False),)
            model.keys = types.SimpleNamespace(distill_weight=0.5, distill_temperature=2.0)
            return model, [(B, T)] * 2
        if name == "moe":
            return moe.MoE(moe.MoEConfig(**SMALL)), [(B, T)] * 2
        if name == "lora":
            return lora.LoRA(shape, 1, None, gpt.GPT(shape).state_dict(), 4, 8.0,
                             ["attn", "mlp"]), [(B, T)] * 2
        if name == "memory":
            return memory.MemoryGPT(memory.MemoryConfig(**SMALL, lora_rank=2), 1, None,
                                    gpt.GPT(shape).state_dict()), [(B, T)] * 2
        if name == "classifier":
            spec = dict(task="joint", classes=["a", "b", "c"], max_tokens=T)
            return classifier.Classifier(shape, spec), [(B, T), (B,), (B,), (B, 2)]
        if name == "sae":
            spec = dict(d_in=32, mean=[0.0] * 32, scale=1.0)
            return sae.SAEModel(config, spec), [(B, T, 32, float)]
        zeros, ones = (dict(a=[v] * 5, b=[v] * 7, target=[v] * 3) for v in (0.0, 1.0))
        spec = dict(modalities=dict(a=5, b=7), target=3, mean=zeros, std=ones)
        return autoencoder.MultimodalAutoencoder(config, spec), [(B, n, float) for n in (5, 7, 3)]


def on_device(name):
    """Return (model, training batch) of the system `name` in SYSTEMS on the GPU. To be called in a
    FakeTensorMode."""
    import torch
    model, shapes = small_model(name)
    batch = [torch.zeros(s[:-1], device="cuda:0") if s[-1] is float else
             torch.zeros(s, dtype=torch.int64, device="cuda:0") for s in shapes]
    for frozen in getattr(model, "frozen", ()):
        fake_cuda.to_device(frozen)
    return fake_cuda.to_device(model), batch


def crossings_in(work):
    """Return {operation: count} of the transfers between CPU and GPU in work(). Reading a number of
    a tensor (.item(), bool, a shape that depends on content) raises an error, because the tensors
    have no content."""
    import collections

    import torch
    found = collections.Counter()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            out = f(*args, **(kwargs or {}))
            tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs, out))
                       if isinstance(t, torch.Tensor) and (t.is_cuda or t.dim())]
            if len({t.device.type for t in tensors}) > 1:
                found[str(f)] += 1
            return out
    with Watch():
        work()
    return dict(found)


def train_crossings():
    """Question: return {name: {operation: count}}, the transfers between CPU and GPU in a training
    step of each of SYSTEMS: forward, backward, sums, clipping, update."""
    return {name: step_crossings(name) for name in SYSTEMS}


def step_crossings(name):
    import torch

    from train.evaluate import pack
    from train.optimizer import configure_optimizers
    from train.train import clip_gradients
    with fake_cuda.fake_tensors():
        model, batch = on_device(name)
        optimizer = configure_optimizers(model, 0.1, 1e-3, (0.9, 0.95), log=lambda text: None)

        def step():
            with torch.autocast("cuda", torch.bfloat16):
                loss, sums = model(*batch)
            loss.backward()
            pack(loss, sums, sums.get("count", 1.0))  # as in train_step
            clip_gradients(optimizer, 1.0)
            optimizer.step()
        step()  # which makes the optimizer's state
        return crossings_in(step)


class HostNumbers:
    """Replacement of a CPU tensor whose numbers are read, which are missing in a FakeTensorMode."""

    def __init__(self, numbers):
        self.numbers = list(numbers)

    def tolist(self):
        return self.numbers

    def __iadd__(self, n):
        return HostNumbers(x + n for x in self.numbers)


def decode_crossings():
    """Question: return {case: {operation: count}}, the transfers between CPU and GPU in decoding a
    token for 1 or 16 texts, of equal or unequal lengths."""
    return {f"{rows} {lengths}": token_crossings(rows, lengths) for rows, lengths in (
        (1, "equal"), (16, "equal"), (16, "unequal"))}


def token_crossings(rows, lengths):
    """Return {operation: count} of the transfers between CPU and GPU in decoding and sampling a
    token. rows: number of texts; lengths: "equal" or "unequal"."""
    import torch

    from model.core.generate import sample_tokens
    from model.core.kv_cache import create_cache
    used = dict(equal=[3], unequal=[3, 5])[lengths] * rows
    with fake_cuda.fake_tensors(), torch.no_grad():
        model = fake_cuda.to_device(small_model("gpt")[0].eval(), torch.bfloat16)
        cache = create_cache(model, rows)
        cache.lengths = HostNumbers(used[:rows])
        idx = torch.zeros(rows, 1, dtype=torch.int64, device="cuda:0")

        def token():
            logits = model(idx, cache=cache, last_only=True)[:, -1]
            for how in (0, None, None), (0.8, 20, None), (1.0, None, 0.9), (1.0, None, None):
                sample_tokens(logits, *how, [None] * rows)
        return crossings_in(token)


def a_crossing():
    """Question: return {operation: count} for a GPU tensor that is indexed with a CPU tensor. It
    shows that crossings_in() finds transfers."""
    import torch
    with fake_cuda.fake_tensors():
        x = torch.zeros(8, device="cuda:0")
        return crossings_in(lambda: x[torch.arange(4)])


def one_token():
    """Question: return, per graph of a compiled token (CompiledDecoder), dict(launches=, why=): the
    kernel launches, and the reasons why it is not a CUDA graph."""
    import torch

    from model.core.kv_cache import create_cache
    from model.core.packed import replace_linear_layers
    from model.sample.compiled import CompiledDecoder, ReductionLinear
    fake_cuda.GRAPHS.clear()
    with fake_cuda.fake_tensors(), torch.no_grad():
        model = fake_cuda.to_device(build("gpt2", 1)[0].eval(), torch.bfloat16)
        cache = create_cache(model, 1)
        cache.lengths = HostNumbers([3])
        decoder = CompiledDecoder(replace_linear_layers(model, ReductionLinear))
        decoder(torch.zeros(1, 1, dtype=torch.int64, device="cuda:0"), cache)
    return [dict(launches=launches(g), why=g.no_cuda_graph) for g in fake_cuda.GRAPHS]


def whole():
    """Question: return {name: {"train" or "eval": number of graphs}} of SYSTEMS, compiled with
    fullgraph, which raises an error for a graph break. Left out are the training of systems that
    step() compiles in this way, and the evaluation of "sae", a hook in the backbone, which is not
    compiled."""
    stepped = {file for file, _, _ in SHAPES.values()}
    return {name: whole_graphs(name, ["train"] * (name not in stepped) + ["eval"] * (name != "sae"))
            for name in SYSTEMS}


def whole_graphs(name, modes):
    import torch
    found = {}
    for mode in modes:
        torch._dynamo.reset()
        graphs = []

        def backend(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return graph.forward
        with fake_cuda.fake_tensors():
            model, batch = on_device(name)
            model.train(mode == "train").compile(dynamic=False, fullgraph=True, backend=backend)
            with torch.autocast("cuda", torch.bfloat16):
                model(*batch)
        found[mode] = len(graphs)
    return found


def fake_ranks(rank, n):
    """Return the Ranks of rank `rank` of n, in a fake process group: collectives return at once,
    without data."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from train.distributed import Ranks
    dist.init_process_group("fake", rank=rank, world_size=n, store=FakeStore())
    return Ranks(rank, n, torch.device("cpu"), dist.group.WORLD)


def collectives(n):
    """Question: return {part of a step: {collective: count}} for FSDP and Muon with 4 blocks, on n
    fake ranks."""
    import torch
    from torch.distributed.tensor.debug import CommDebugMode

    from model import gpt
    from train.config import load_config
    from train.distributed import shard
    from train.optimizer import configure_optimizers
    from train.train import clip_gradients
    ranks = fake_ranks(0, n)
    config = load_config(None, dict(n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=n,
                                    gradient_accumulation_steps=1, device="cpu"))
    with torch.device("meta"):
        model = gpt.build_model(config, types.SimpleNamespace(spec=dict(vocab_size=4096)))
    shard(model, ranks, torch.bfloat16, 1, model.initial)
    optimizer = configure_optimizers(model, 0.1, 1e-3, (0.9, 0.95), log=lambda text: None,
                                     muon=dict(lr=0.02, momentum=0.95, weight_decay=0.0))
    x, counts = torch.randint(4096, (2, 64)), {}

    def passes():
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = model(x, x)
        loss.backward()
    for part, work in (("passes", passes), ("clip", lambda: clip_gradients(optimizer, 1.0)),
                       ("update", optimizer.step)):
        with CommDebugMode() as comm:
            work()
        counts[part] = {str(k).split(".")[-1]: v for k, v in comm.get_comm_counts().items()}
    return counts


def ddp_graphs(ranks, cut):
    """Return the number of matrix products in each forward graph of a compiled model of 4 blocks
    under DDP. cut: whether the compiler splits graphs at DDP's gradient buckets, so that these are
    reduced during the backward pass (optimize_ddp)."""
    import torch

    from model import gpt
    from train.distributed import wrap_ddp
    model = gpt.GPT(gpt.GPTConfig(n_layer=4, n_head=12, n_embd=768, n_hidden=3072, vocab_size=512,
                                  block_size=8))
    graphs = []

    def backend(graph, inputs):
        graphs.append(sum("linear" in str(n.target) for n in graph.graph.nodes))
        return graph.forward
    model.compile(dynamic=False, fullgraph=not cut, backend=backend)
    torch._dynamo.config.optimize_ddp = cut
    wrapped = wrap_ddp(model, ranks)
    x = torch.zeros(1, 8, dtype=torch.int64)
    wrapped(x, x)
    return graphs


def gathered(world_size, n):
    """Question: return ([number of matrices that each all-gather sends], number of updates) for an
    update of n matrices with Muon, on world_size fake ranks."""
    import torch
    import torch.distributed as dist

    from train.optimizer import orthogonalize_together
    fake_ranks(world_size - 1, world_size)
    name = next(name for name in ("all_gather_single", "all_gather_into_tensor")
                if hasattr(dist, name))
    sent, gather = [], getattr(dist, name)

    def watched(out, mine):
        sent.append(out.numel())
        return gather(out, mine)
    setattr(dist, name, watched)
    updates = orthogonalize_together([torch.randn(16, 48) for _ in range(n)])
    return [n / (16 * 48) for n in sent], len(updates)


def main(folder, gpu, *questions):
    gc.disable()  # a third of the time
    out, sys.stdout = sys.stdout, sys.stderr  # where PyTorch may say something
    fake_cuda.load(folder)
    fake_cuda.pretend(gpu)
    for question in questions:
        name, *args = question.split()
        try:
            answer, error = globals()[name](*args), None
        except Exception:
            answer, error = None, traceback.format_exc()
        print(json.dumps([question, answer, error]), file=out, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
