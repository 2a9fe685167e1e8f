"""A network's forward pass, recorded once as a CUDA graph and replayed from then on.

A small network's pass is hundreds of kernels of a few microseconds, and a solver asks for it again and again at one shape:
launching the kernels one by one takes longer than running them. A graph is launched once. Its inputs lie in fixed buffers; its
output is handed out as a copy, which the caller may keep.

A graph reads the weights where they are: it holds as long as they are changed in place. Where they are, which parts there are,
and the mode and the hooks of each, is looked up before every replay.
"""

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from noisewise.precision import _switches

if TYPE_CHECKING:
    from noisewise.training.fast.recording import Premise, Recording

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
        self._known: dict[Hashable, Recording | int] = {}  # recordings, or how often the inputs were seen; latest use last
        self._pool: Any = None
        self._premise: Premise | None = None

    def __call__(self, *inputs: Tensor | None) -> Any:
        if not self._applies(inputs):
            return self.call(*inputs)
        if self._premise is not None and not self._premise.holds():
            self._known.clear()
            self._premise = None
        key = _key(inputs)
        found: Recording | int | None = self._known.pop(key, 0)
        if isinstance(found, int):
            found = found + 1 if found < self.after else self._record(inputs)
        if found is None:
            return self.call(*inputs)
        self._known[key] = found
        while len(self._known) > KEPT:
            del self._known[next(iter(self._known))]
        return self.call(*inputs) if isinstance(found, int) else found(*inputs).clone()

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

    def _record(self, inputs: tuple[Tensor | None, ...]) -> "Recording | None":
        # here, because the trainer's packages are not needed without a GPU
        from noisewise.training.fast.recording import Premise, Recording, against

        self.why_not = against(self.module)
        if self.why_not is None:
            try:
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                call = self.call
                made = Recording(lambda *given: _tensor(call(*given)), inputs, self._pool)
                self._premise = Premise(self.module)
                return made
            except Exception as error:  # whatever stands in the way, the plain call gives the same numbers
                self.why_not = (str(error).strip() or type(error).__name__).splitlines()[0]
        self._known.clear()
        self._premise = None
        return None


def replayed(model: Any) -> Any:
    """A module as a `Replay` of its own; anything else as it is, since a function may do more than its arithmetic."""
    return Replay(model, model) if isinstance(model, nn.Module) else model


def _key(inputs: tuple[Tensor | None, ...]) -> Hashable:
    """What a recording depends on besides values and weights."""
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    precision = tuple(getattr(where, name) for where, name, _ in _switches())  # TF32 or not
    convolutions = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    shapes = tuple(None if value is None else (value.shape, value.dtype, value.device) for value in inputs)
    return shapes, autocast, precision, convolutions, torch.is_inference_mode_enabled()


def _tensor(output: Any) -> Tensor:
    output = getattr(output, "sample", output)  # diffusers' models return a dataclass
    if not isinstance(output, Tensor):
        raise TypeError(f"the model returned {type(output).__name__}, not a tensor")
    return output
