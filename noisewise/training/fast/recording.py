"""One call on fixed buffers, recorded once as a CUDA graph and replayed from then on: for images (generation/replay.py) and for
probes of a run (probes.py).

Autocast. The casts of the weights must be inside the graph: otherwise it would go on reading copies that are freed when
autocast ends, and that no later change of the weights (training, an average written over them) would ever reach. Autocast keeps
its casts in a cache as long as its outermost block is open, and a switch set by an outer block does not hold inside an inner
one, which some models have in their forward. So the cache is emptied right before the recording, whereby each weight is cast
anew inside the graph, and right after it, because those casts lie in the graph's own memory.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from noisewise.feedback import preserved_random_state
from noisewise.training.fast.graphs import MODE, recover, waiting_is_an_error, without_collection

WARM_UP = 1  # passes on the recording's own stream, before one in which waiting is an error


class Buffered:
    """`call(*inputs)` on buffers of its own, kernel by kernel: a recording for devices without graphs."""

    def __init__(self, call: Callable[..., Any], inputs: tuple[Tensor | None, ...]) -> None:
        self.call = call
        self.inputs = [None if value is None else value.clone() for value in inputs]

    def __call__(self, *inputs: Tensor | None) -> Any:
        for buffer, value in zip(self.inputs, inputs, strict=True):
            if buffer is not None and value is not None:
                buffer.copy_(value)
        return self.run()

    def run(self) -> Any:
        return self.call(*self.inputs)


class Recording(Buffered):
    """One graph with its buffers; what it returns is written over by the next replay.

    Graphs that share a pool share their memory: none keeps anything in it from one replay to the next but its output, which
    stays reserved. They must not run at the same time.

    Args:
        call: takes tensors, or None in their place.
        inputs: examples, of the shapes and types that all later ones have.
        pool: of memory; `torch.cuda.graph_pool_handle()`, or that of another graph.
        stream: on which to record; that of the pool's other graphs, since memory is reused within a stream alone.
    """

    def __init__(
        self, call: Callable[..., Any], inputs: tuple[Tensor | None, ...], pool: Any, stream: torch.cuda.Stream | None = None
    ) -> None:
        super().__init__(call, inputs)
        device = next(value.device for value in inputs if value is not None)
        current = torch.cuda.current_stream(device)
        stream = side_stream(device) if stream is None else stream
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
                    with without_collection(), torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode=MODE):
                        self.output = call(*self.inputs)
                except BaseException:
                    recover(device, pool)
                    raise
                finally:
                    torch.clear_autocast_cache()
        finally:
            current.wait_stream(stream)
        del self.call  # it may hold on to all of a run

    def run(self) -> Any:
        self.graph.replay()
        return self.output


class Premise:
    """What recordings of a module rely on: its parts and their modes, no hooks, weights and buffers where they were."""

    def __init__(self, module: nn.Module) -> None:
        self.parts = list(module.modules())
        self.tensors = [held for part in self.parts for held in (part._parameters, part._buffers) if held]
        self.children = [part._modules for part in self.parts if part._modules]
        self.modes, self.places, self.within = self._modes(), self._places(), self._within()

    def holds(self) -> bool:
        hooked = any(part._forward_hooks or part._forward_pre_hooks for part in self.parts)
        as_they_were = self._modes() == self.modes and self._places() == self.places and self._within() == self.within
        return not hooked and as_they_were

    def _modes(self) -> list[bool]:
        return [part.training for part in self.parts]

    def _within(self) -> list[int]:
        return [id(child) for held in self.children for child in held.values()]  # `parts` keeps them alive

    def _places(self) -> list[int]:
        return [tensor.data_ptr() for held in self.tensors for tensor in held.values() if tensor is not None]


def against(module: nn.Module) -> str | None:
    """The reason against a recording that is known beforehand."""
    if torch.version.cuda is None:
        return "CUDA graphs were not tried on this kind of device"
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "several processes exchange buffers in the forward pass"
    hooked = [name for name, part in module.named_modules() if part._forward_hooks or part._forward_pre_hooks]
    return f"the model has hooks (on {hooked[0] or 'itself'}), which a graph would not call" if hooked else None


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings on a device: libraries keep a workspace for every stream they have seen."""
    return torch.cuda.Stream(device)
