"""A simulated GPU on the CPU build of PyTorch: tensors without content on "cuda:0" pass through the
real code of the models, autograd, Dynamo and Inductor, down to Triton's kernels; nothing is
computed.

    load(folder)      # before torch is imported
    pretend("H100")   # then torch.compile appends its graphs to GRAPHS instead of running them

It changes torch for the whole process, so it is only used in separate processes (proofs.py). It
depends on private names of PyTorch of the version TORCH.
"""

import contextlib
import ctypes
import importlib.util
import pathlib
import shutil
import subprocess
import types

TORCH, HERE = "2.13", pathlib.Path(__file__).resolve().parent
GRAPHS = []  # of torch.compile since the start, see capture()
GPUS = {  # what Inductor and Triton ask of a GPU
    "H100": dict(name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132,
                 shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
                 L2_cache_size=50 << 20),
    "A100": dict(name="NVIDIA A100-SXM4-80GB", major=8, minor=0, multi_processor_count=108,
                 shared_memory_per_block_optin=166912, shared_memory_per_multiprocessor=167936,
                 L2_cache_size=40 << 20)}
COMMON = dict(total_memory=80 << 30, regs_per_multiprocessor=65536, warp_size=32, gcnArchName="",
              max_threads_per_multi_processor=2048, max_threads_per_block=1024, is_integrated=0,
              shared_memory_per_block=49152, is_multi_gpu_board=0, uuid="none")


def missing():
    """Return a text: the reason why the simulation is not possible on this machine (another version
    of torch, no triton, no g++), or None if it is."""
    spec = importlib.util.find_spec("torch")
    version = (pathlib.Path(spec.origin).parent / "version.py").read_text()
    if f"__version__ = '{TORCH}." not in version or "cuda: Optional[str] = None" not in version:
        return f"needs the CPU build of torch {TORCH}, whose inside it knows"
    if not importlib.util.find_spec("triton"):
        return "needs triton: pip install --no-deps triton"
    return None if shutil.which("g++") else "needs g++"


def build(folder):
    """Compile fake_cuda.cpp to a shared library in `folder`, for load()."""
    torch = pathlib.Path(importlib.util.find_spec("torch").origin).parent
    subprocess.run(["g++", "-shared", "-fPIC", "-std=c++20", f"-I{torch}/include",
                    HERE / "fake_cuda.cpp", "-o", pathlib.Path(folder) / "fake_cuda.so",
                    f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"],
                   check=True)


def load(folder):
    ctypes.CDLL(str(pathlib.Path(folder) / "fake_cuda.so"), mode=ctypes.RTLD_GLOBAL)


def pretend(gpu):
    """Patch torch and triton in this process so that they see one GPU. gpu: a name in GPUS, e.g.
    "H100"."""
    import torch
    import triton
    properties = types.SimpleNamespace(**COMMON, **GPUS[gpu])
    capability = (properties.major, properties.minor)
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda *args: torch.zeros(16, dtype=torch.uint8)
        module.set_rng_state = lambda *args: None
    for name, value in dict(
            is_available=True, device_count=1, current_device=0, get_device_name=properties.name,
            get_device_properties=properties, get_device_capability=capability,
            is_bf16_supported=True, synchronize=None, _lazy_init=None, set_device=None,
            _exchange_device=0, _maybe_exchange_device=0).items():
        setattr(torch.cuda, name, constant(value))
    torch._C._cuda_getCurrentRawStream = constant(0)
    torch._C._cuda_cudaCachingAllocator_is_enabled = constant(True)
    pretend_to_compiler(torch, properties, capability)
    target = triton.backends.compiler.GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    triton.runtime.driver.set_active(types.SimpleNamespace(
        get_current_target=constant(target), get_current_device=constant(0),
        get_current_stream=constant(0), is_active=constant(True),
        get_active_torch_device=constant(torch.device("cuda:0"))))
    import torch._inductor.output_code
    from torch._inductor.graph import GraphLowering
    GraphLowering._compile_to_module = capture

    def no_cuda_graph(inputs, graph, *args):
        """Replaces the step of Inductor that makes a CUDA graph of `graph`. Stores, in the last of
        GRAPHS, a list of reasons why it would not be one: [] if it would."""
        moving = set(graph.mutated_input_idxs) - set(graph.fx_kwargs["static_input_idxs"])
        GRAPHS[-1].no_cuda_graph = [*graph.cudagraph_info.cudagraph_fail_reasons,
                                    *(f"input {i} is changed, and moves" for i in moving)]
    for name in ("cudagraph_post_compile", "cudagraph_partition_post_compile"):
        setattr(torch._inductor.output_code, name, no_cuda_graph)


def constant(value):
    """Return a function that returns `value` for all arguments, to replace a function of
    PyTorch."""
    return lambda *args, **kwargs: value


def pretend_to_compiler(torch, properties, capability):
    """Patch Dynamo and Inductor, as pretend() does torch.cuda. torch: the module; properties: of
    the GPU; capability: (major, minor)."""
    import torch._dynamo.utils
    import torch._inductor.config
    from torch._dynamo import device_interface
    from torch._inductor.fx_passes import fuse_attention, joint_graph
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from torch.utils import _triton
    torch._dynamo.utils.common_constant_types.add(type(properties))
    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.use_static_triton_launcher = False  # it would drop what was compiled
    interface = device_interface.CudaInterface
    for owner, values in (
            (interface, dict(is_available=True, current_device=0, device_count=1,
                             get_device_properties=properties, is_triton_capable=True,
                             get_compute_capability=capability[0] * 10 + capability[1],
                             raise_if_triton_unavailable=None, synchronize=None, set_device=None,
                             exchange_device=0, maybe_exchange_device=0)),
            (interface.Worker, dict(get_device_properties=properties, current_device=0,
                                    set_device=None))):
        for name, value in values.items():
            setattr(owner, name, staticmethod(constant(value)))
    for name in ("has_triton", "has_triton_package"):
        setattr(_triton, name, constant(True))
    for module in (triton_helpers, triton_heuristics):
        module.set_driver_to_gpu = constant(None)
    fuse_attention._sfdp_init = constant(None)  # its patterns are traced with real tensors

    class OnHost(torch.utils._python_dispatch.TorchDispatchMode):
        """Mode in which operations run on the CPU: Inductor's constant folding computes with real
        tensors of one element."""

        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            cpu = torch.device("cpu")
            args = [cpu if isinstance(a, torch.device) else a for a in args]
            return f(*args, **{k: cpu if isinstance(v, torch.device) else v
                               for k, v in (kwargs or {}).items()})
    folder = joint_graph.UniformValueConstantFolder
    deduce = folder._deduce_value

    def deduce_on_host(self, node):
        with OnHost():
            return deduce(self, node)
    folder._deduce_value = deduce_on_host


# -----------------------------------------------------------------------------
# models, and what was compiled of them

def to_device(model, dtype=None):
    """Replace the parameters and buffers of `model`, in place, by empty ones on the GPU, parameters
    in `dtype`, if given; return the model. To be called in a FakeTensorMode."""
    import torch
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                new = torch.empty(p.shape, dtype=dtype or p.dtype, device="cuda:0")
                module._parameters[name] = torch.nn.Parameter(new, p.requires_grad)
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = torch.empty(b.shape, dtype=b.dtype, device="cuda:0")
    return model


@contextlib.contextmanager
def fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def capture(lowering):
    """Replaces GraphLowering._compile_to_module of Inductor: append the code that it generates for
    a graph, with statistics, to GRAPHS, and return a module whose call() does not run the code but
    returns empty tensors of the right shapes."""
    import torch
    code, _ = lowering.codegen()
    total, by_node, _ = lowering.count_bytes()
    nodes = lowering.orig_gm.graph.find_nodes(op="output")[0].args[0]
    values = [n.meta["val"] if isinstance(n, torch.fx.Node) else n for n in nodes]
    GRAPHS.append(types.SimpleNamespace(
        source=code.value, bytes=total, module=lowering.orig_gm,
        fused=4 * sum(n for node, n in by_node if not node.is_extern()),  # it divides by 4
        backward=lowering.is_backward, outputs=nodes,
        no_cuda_graph=None))

    def call(inputs):
        inputs.clear()
        return tuple(torch.empty_strided(v.size(), v.stride(), dtype=v.dtype, device=v.device)
                     if isinstance(v, torch.Tensor) else v for v in values)
    return types.SimpleNamespace(call=call, runner=None, __file__="none", key="none")
