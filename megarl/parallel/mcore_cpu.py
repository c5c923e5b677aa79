"""Gives Megatron-core's unconditional `torch.cuda.*` calls their CPU meaning. Installed only where there is no CUDA.

`torch.cuda` itself stays untouched. Every `megarl`-relevant `megatron.core` module that has a global named `torch` gets
a facade instead, which differs from torch in three things: `.cuda` answers for the CPU, factories ignore
`device="cuda"`, and `pin_memory` is dropped. Modules that compare `Tensor.type()` with 'torch.cuda.*Tensor' literals
have those literals exchanged, and the CUDA random-state tracker forks the CPU generator.

Works in any import order: modules already loaded are treated at once, later ones by a hook on the import system.
"""

import contextlib
import importlib.abc
import sys
import types
import warnings

import torch

_CPU = torch.device("cpu")
_FACTORIES = (
    "tensor empty zeros ones full rand randn randint arange empty_like zeros_like ones_like full_like linspace eye "
    "tril_indices triu_indices as_tensor"
).split()
_CUDA_TYPE_NAMES = {f"torch.cuda.{kind}": f"torch.{kind}" for kind in ("FloatTensor", "HalfTensor", "BFloat16Tensor")}
_TYPE_COMPARING_MODULES = {
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.clip_grads",
}


class _Stream:
    """A stream or event of a device whose work is done when a call returns."""

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        return self

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True


class _CudaFacade(types.ModuleType):
    """What megatron.core sees as `torch.cuda` on a machine without a GPU."""

    Stream = Event = _Stream

    def __init__(self):
        super().__init__("torch.cuda (CPU facade)")

    def current_device(self):
        return _CPU

    def device_count(self):
        return 1

    def is_available(self):
        return False

    def synchronize(self, *args):
        pass

    def empty_cache(self):
        pass

    def set_device(self, *args):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def get_rng_state(self, *args):
        return torch.get_rng_state()

    def set_rng_state(self, state, *args):
        torch.set_rng_state(state)

    def current_stream(self, *args):
        return _Stream()

    default_stream = current_stream

    def stream(self, *args):
        return contextlib.nullcontext()

    def is_current_stream_capturing(self):
        return False

    def __getattr__(self, name):
        return getattr(torch.cuda, name)


def _on_cpu(factory):
    def wrapped(*args, **kwargs):
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    wrapped.__name__ = factory.__name__
    return wrapped


class _TorchFacade(types.ModuleType):
    def __init__(self):
        super().__init__("torch")
        self.cuda = _CudaFacade()
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name):
        return getattr(torch, name)


_FACADE = _TorchFacade()


def _with_cpu_type_names(constant):
    if isinstance(constant, str):
        return _CUDA_TYPE_NAMES.get(constant, constant)
    if isinstance(constant, tuple):
        return tuple(_with_cpu_type_names(item) for item in constant)
    if isinstance(constant, types.CodeType):
        return constant.replace(co_consts=tuple(_with_cpu_type_names(item) for item in constant.co_consts))
    return constant


def _functions_of(module):
    for value in list(vars(module).values()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members = vars(value).values() if isinstance(value, type) else [value]
        for member in members:
            member = getattr(member, "__func__", member)
            member = getattr(member, "__wrapped__", member)
            if isinstance(member, types.FunctionType):
                yield member


def _treat_random(module):
    module._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    class CPURNGStatesTracker(module.CudaRNGStatesTracker):
        """The same named random states, on the one generator that a CPU has."""

        @contextlib.contextmanager
        def fork(self, name=module._MODEL_PARALLEL_RNG_TRACKER_NAME):
            if name not in self.states_:
                raise ValueError(f"random state {name!r} is not known; known: {sorted(self.states_)}")
            outside = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outside)

    module.CudaRNGStatesTracker = CPURNGStatesTracker


def _treat_distributed_optimizer(module):
    """torch's Adam keeps `step` in its state; the loaders of sharded checkpoints drop it unless it is passed on."""
    original = module.DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self, model_param, tensors):
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state and "step" not in tensors:
            tensors = {**tensors, "step": state["step"]}
        return original(self, model_param, tensors)

    module.DistributedOptimizer._set_main_param_and_optimizer_states = with_step


def _treat_moe_utils(module):
    """Megatron 0.16 asks whether this name is None, but defines it only where TransformerEngine is installed."""
    if "te_general_gemm" not in vars(module):
        module.te_general_gemm = None


def _treat_token_dispatcher(module):
    """Split sizes are numbers for gloo; the original makes them so only when they come from a GPU."""

    def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    module.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


def _treat_mappings(module):
    """gloo gathers and reduce-scatters equal parts only: parts of unequal length travel padded to the longest."""
    even_gather, even_reduce_scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def padded(part, length):
        return torch.cat([part, part.new_zeros(length - part.shape[0], *part.shape[1:])])

    def gather(input_, group, output_split_sizes=None, use_global_buffer=False):
        if output_split_sizes is None or group.size() == 1:
            return even_gather(input_, group, None, use_global_buffer)
        longest = max(output_split_sizes)
        gathered = even_gather(padded(input_, longest), group, None, use_global_buffer).split(longest)
        return torch.cat([part[:size] for part, size in zip(gathered, output_split_sizes, strict=True)])

    def reduce_scatter(input_, group, input_split_sizes=None, use_global_buffer=False):
        if input_split_sizes is None or group.size() == 1:
            return even_reduce_scatter(input_, group, None, use_global_buffer)
        longest = max(input_split_sizes)
        parts = torch.cat([padded(part, longest) for part in input_.split(list(input_split_sizes))])
        own = even_reduce_scatter(parts, group, None, use_global_buffer)
        return own[: input_split_sizes[group.rank()]].contiguous()

    module._gather_along_first_dim, module._reduce_scatter_along_first_dim = gather, reduce_scatter


_TREATMENTS = {
    "megatron.core.tensor_parallel.random": _treat_random,
    "megatron.core.tensor_parallel.mappings": _treat_mappings,
    "megatron.core.optimizer.distrib_optimizer": _treat_distributed_optimizer,
    "megatron.core.transformer.moe.moe_utils": _treat_moe_utils,
    "megatron.core.transformer.moe.token_dispatcher": _treat_token_dispatcher,
}


def _treat(module):
    if vars(module).get("torch") is not torch:
        return
    module.torch = _FACADE
    if module.__name__ in _TYPE_COMPARING_MODULES:
        for function in _functions_of(module):
            function.__code__ = _with_cpu_type_names(function.__code__)
    if module.__name__ in _TREATMENTS:
        _TREATMENTS[module.__name__](module)


class _Hook(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if not name.startswith("megatron.core"):
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            return None
        if spec.loader is None:  # a namespace package has no code
            return spec
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            _treat(module)

        spec.loader.exec_module = exec_module
        return spec


def _tensor_cuda(self, *args, **kwargs):
    """`Tensor.cuda()` called by megatron.core means "to this process's device"; for any other caller it is torch's."""
    caller = sys._getframe(1).f_globals.get("__name__", "")
    return self if caller.startswith("megatron.core") else _original_tensor_cuda(self, *args, **kwargs)


_original_tensor_cuda = torch.Tensor.cuda


def install() -> None:
    """Treat every megatron.core module, loaded or to come. Calling it again changes nothing."""
    if torch.Tensor.cuda is _tensor_cuda:
        return
    # On a CPU the torch fallbacks that these warnings announce are what we want.
    warnings.filterwarnings(
        "ignore", message=".*(Transformer Engine|Apex|APEX).*not installed", module=r"megatron\.core"
    )
    torch.Tensor.cuda = _tensor_cuda
    sys.meta_path.insert(0, _Hook())
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and isinstance(module, types.ModuleType):
            _treat(module)
