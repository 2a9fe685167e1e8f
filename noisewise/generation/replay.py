"""A network's forward pass, recorded once as a CUDA graph and replayed from then on.

A small network's pass is hundreds of kernels of a few microseconds, and a solver asks for it again and again at one shape:
launching the kernels one by one takes longer than running them. A graph is launched once. Its inputs lie in fixed buffers; its
output is handed out as a copy, which the caller may keep.

Autocast. The casts of the weights must be inside the graph: otherwise it would go on reading copies that are freed when
autocast ends, and that no later change of the weights (training, an average written over them) would ever reach. Autocast keeps
its casts in a cache as long as its outermost block is open, and a switch set by an outer block does not hold inside an inner
one, which some models have in their forward. So the cache is emptied right before the recording, whereby each weight is cast
anew inside the graph, and right after it, because those casts lie in the graph's own memory.

A graph reads the weights where they are: it holds as long as they are changed in place. Where they are, and the mode and the
hooks of each part, is looked up before every replay. A part that is exchanged for another goes unnoticed.
"""

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from noisewise.feedback import _switches, preserved_random_state

WARM_UP = 1  # passes on the recording's own stream, before one in which waiting is an error; the first call was one too
KEPT = 4  # recordings of different inputs: a batch, the last one of a set, and both again where guidance doubles them


class Replay:
    """`call(*inputs)`, replayed where it can be, else called: the same numbers either way.

    It can be on an NVIDIA GPU, without gradients, in evaluation mode, without hooks, from the second call with inputs of one
    shape and type on. Whatever the call does on the host is done no more then. What cannot be recorded, such as a forward pass
    that waits for the device, is called for good; `why_not` says why. Graphs live as long as this object does, or until weights
    are moved (`module.to`), a part changes its mode or gets a hook: then it begins anew.

    Args:
        call: takes tensors, or None in their place, and returns a tensor (or what holds one as `sample`).
        module: the network that it calls.
        after: how many calls with inputs of one shape to make before one is recorded.
    """

    def __init__(self, call: Callable[..., Any], module: nn.Module, *, after: int = 1) -> None:
        if after < 0:
            raise ValueError(f"after must be >= 0, got {after}")
        self.call, self.module, self.after = call, module, after
        self.why_not: str | None = None
        self._known: dict[Hashable, _Recording | int] = {}  # recordings, or how often the inputs were seen; latest use last
        self._pool: Any = None
        self._premise: _Premise | None = None

    def __call__(self, *inputs: Tensor | None) -> Any:
        if not self._applies(inputs):
            return self.call(*inputs)
        if self._premise is not None and not self._premise.holds():
            self._known.clear()
            self._premise = None
        key = _key(inputs)
        found: _Recording | int | None = self._known.pop(key, 0)
        if isinstance(found, int):
            found = found + 1 if found < self.after else self._record(inputs)
        if found is None:
            return self.call(*inputs)
        self._known[key] = found
        while len(self._known) > KEPT:
            del self._known[next(iter(self._known))]
        return self.call(*inputs) if isinstance(found, int) else found(*inputs)

    @property
    def recorded(self) -> int:
        """How many recordings there are."""
        return sum(not isinstance(found, int) for found in self._known.values())

    def _applies(self, inputs: tuple[Tensor | None, ...]) -> bool:
        devices = {value.device for value in inputs if value is not None}
        return (
            len(devices) == 1
            and next(iter(devices)).type == "cuda"
            and self.why_not is None
            and not self.module.training
            and not torch.is_grad_enabled()
            and not torch.cuda.is_current_stream_capturing()
        )

    def _record(self, inputs: tuple[Tensor | None, ...]) -> "_Recording | None":
        self.why_not = _against(self.module)
        if self.why_not is None:
            try:
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                made = _Recording(self.call, inputs, self._pool)
                self._premise = _Premise(self.module)
                return made
            except Exception as error:  # whatever stands in the way, the plain call gives the same numbers
                self.why_not = (str(error).strip() or type(error).__name__).splitlines()[0]
        self._known.clear()
        self._premise = None
        return None


class _Premise:
    """What recordings of a module rely on: modes of its parts as they were, no hooks, weights and buffers where they were."""

    def __init__(self, module: nn.Module) -> None:
        self.parts = list(module.modules())
        self.tensors = [held for part in self.parts for held in (part._parameters, part._buffers) if held]
        self.modes, self.places = self._modes(), self._places()

    def holds(self) -> bool:
        hooked = any(part._forward_hooks or part._forward_pre_hooks for part in self.parts)
        return not hooked and self._modes() == self.modes and self._places() == self.places

    def _modes(self) -> list[bool]:
        return [part.training for part in self.parts]

    def _places(self) -> list[int]:
        return [tensor.data_ptr() for held in self.tensors for tensor in held.values() if tensor is not None]


class _Recording:
    """One graph with its buffers.

    Graphs of one `Replay` share their memory: none keeps anything in it from one replay to the next but its output, which
    stays reserved.
    """

    def __init__(self, call: Callable[..., Any], inputs: tuple[Tensor | None, ...], pool: Any) -> None:
        # here, because the trainer's packages are not needed without a GPU
        from noisewise.training.fast.graphs import recover, waiting_is_an_error

        self.inputs = [None if value is None else value.clone() for value in inputs]
        device = next(value.device for value in inputs if value is not None)
        current, stream = torch.cuda.current_stream(device), _side_stream(device)
        self.graph = torch.cuda.CUDAGraph()
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream), preserved_random_state():
                for _ in range(WARM_UP):
                    call(*self.inputs)
                with waiting_is_an_error():  # what waits cannot be recorded, and a failed recording is hard to recover from
                    call(*self.inputs)
                torch.clear_autocast_cache()
                try:
                    # other threads may go on using the device, such as one that reads data ahead
                    with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                        self.output = _tensor(call(*self.inputs))
                except BaseException:
                    recover(device, pool)
                    raise
                finally:
                    torch.clear_autocast_cache()
        finally:
            current.wait_stream(stream)

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        for buffer, value in zip(self.inputs, inputs, strict=True):
            if buffer is not None and value is not None:
                buffer.copy_(value)
        self.graph.replay()
        return self.output.clone()


def replayed(model: Any) -> Any:
    """A module as a `Replay` of its own; anything else as it is, since a function may do more than its arithmetic."""
    return Replay(model, model) if isinstance(model, nn.Module) else model


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings on a device: libraries keep a workspace for every stream they have seen."""
    return torch.cuda.Stream(device)


def _key(inputs: tuple[Tensor | None, ...]) -> Hashable:
    """What a recording depends on besides values and weights."""
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    precision = tuple(getattr(where, name) for where, name, _ in _switches())  # TF32 or not
    convolutions = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    shapes = tuple(None if value is None else (value.shape, value.dtype, value.device) for value in inputs)
    return shapes, autocast, precision, convolutions, torch.is_inference_mode_enabled()


def _against(module: nn.Module) -> str | None:
    """The reason against a recording that is known beforehand."""
    if torch.version.cuda is None:
        return "CUDA graphs were not tried on this kind of device"
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "several processes exchange buffers in the forward pass"
    hooked = [name for name, part in module.named_modules() if part._forward_hooks or part._forward_pre_hooks]
    return f"the model has hooks (on {hooked[0] or 'itself'}), which a graph would not call" if hooked else None


def _tensor(output: Any) -> Tensor:
    output = getattr(output, "sample", output)  # diffusers' models return a dataclass
    if not isinstance(output, Tensor):
        raise TypeError(f"the model returned {type(output).__name__}, not a tensor")
    return output
