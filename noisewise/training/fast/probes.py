"""What samplers ask of the network around a step, recorded and replayed: losses and gradients of rows at other noise levels.

A sampler that probes asks for the same few shapes again and again. Each is recorded at its first use, with the kernels of the
network itself and not compiled once more: the noise and the dropout of a seed are those of the plain path, and so are the
numbers, up to the choice of convolutions. Their graphs share one memory, which is not the step's: a recording that fails takes
its memory with it.
"""

import time
import warnings
import weakref
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from noisewise.feedback import computing_in
from noisewise.training.fast.graphs import fixed_order, repeatable_kernels
from noisewise.training.fast.recording import Buffered, Premise, Recording, against
from noisewise.training.step import first_line

if TYPE_CHECKING:
    from noisewise.training.fast.graphs import GraphedStep

KEPT = 16  # recordings, of which all share one memory


class Known(NamedTuple):
    recording: Buffered
    premise: Premise


class Probes:
    """Recordings of a step's network, and of what samplers compute for a draw.

    A kind of call that cannot be recorded is made kernel by kernel for good, after one warning; `reasons` says why.

    Args:
        step: whose network, precision and stream they have.
        record: without it the same arithmetic runs on the same fixed buffers as separate kernels, for tests without CUDA.
    """

    def __init__(self, step: "GraphedStep", record: bool = True) -> None:
        self.step: GraphedStep = weakref.proxy(step)  # no cycle: a run that ends frees its graphs at once
        self.record = record
        self._pool: Any = None  # of memory
        self.parameters = [value for value in step.network.parameters() if value.requires_grad]
        self.reasons: dict[str, str] = {}
        self._known: dict[Hashable, Known] = {}  # latest use last

    @property
    def recorded(self) -> int:
        """How many recordings there are."""
        return len(self._known)

    @property
    def why_not(self) -> str | None:
        """The first reason why something is not recorded."""
        return next(iter(self.reasons.values()), None)

    def of(self, x0: Tensor, labels: Tensor | None) -> "RecordedLosses":
        """The function that gives losses of this batch's rows at any noise levels."""
        return RecordedLosses(self, x0, labels)

    def losses(self, x0: Tensor, labels: Tensor | None, u: Tensor, precision: str | None = None) -> Tensor:
        """One a sample, without gradients."""
        call = partial(self._losses, precision)
        found = self._recording("losses", precision, call, self.step.network, (x0, labels, u))
        return call(x0, labels, u) if found is None else found(x0, labels, u).clone()

    def gradients(
        self, x0: Tensor, labels: Tensor | None, u: Tensor, weight: Tensor
    ) -> list[tuple[nn.Parameter, Tensor]] | None:
        """Of the weighted sum of losses, for each parameter that has one; overwritten by the next call. None: not recorded."""
        found = self._recording("gradients", None, self._gradients, self.step.network, (x0, labels, u, weight))
        if found is None:
            return None
        values = found(x0, labels, u, weight)
        return [(one, value) for one, value in zip(self.parameters, values, strict=True) if value is not None]

    def replay(self, call: Callable[..., Any], module: nn.Module, *inputs: Tensor) -> Any:
        """call(*inputs), a tuple of tensors, where the call reads nothing else but the module's weights."""
        found = self._recording("draws", call.__qualname__, call, module, inputs)
        return call(*inputs) if found is None else tuple(value.clone() for value in found(*inputs))

    # What is recorded -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _losses(self, precision: str | None, x0: Tensor, labels: Tensor | None, u: Tensor) -> Tensor:
        with computing_in(precision, self.step.network):
            return self.step.loss_at(x0, labels)(slice(None), u)

    @torch.enable_grad()
    def _gradients(self, x0: Tensor, labels: Tensor | None, u: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
        # a batch as large as those of training goes through what is compiled already
        call = self.step.compiled if len(u) == self.step.config.micro_batch else None
        losses = self.step.loss_at(x0, labels, call)(slice(None), u)
        return torch.autograd.grad((weight * losses).sum(), self.parameters, allow_unused=True)

    # ----------------------------------------------------------------------------------------------------------------

    def _recording(
        self, kind: str, which: Hashable, call: Callable[..., Any], module: nn.Module, inputs: tuple[Tensor | None, ...]
    ) -> Buffered | None:
        """One for inputs of these shapes, made at their first use; None where that cannot be done."""
        if kind in self.reasons:
            return None
        key = kind, which, id(module), tuple(None if value is None else (value.shape, value.dtype) for value in inputs)
        found = self._known.get(key)
        if found is None or not found.premise.holds():
            if self.record and against(module) is not None:
                return None  # such as a hook, for as long as it is there
            made = self._made(kind, call, module, inputs)
            if made is None:
                return None
            found = Known(made, Premise(module))  # now: the first call may have made parts of the module
        self._known.pop(key, None)
        self._known[key] = found
        while len(self._known) > KEPT:
            del self._known[next(iter(self._known))]
        return found.recording

    def _made(
        self, kind: str, call: Callable[..., Any], module: nn.Module, inputs: tuple[Tensor | None, ...]
    ) -> Buffered | None:
        """A recording, off the clock; None where that fails, then and from then on."""
        step = self.step
        step.wait()
        begun = time.perf_counter()
        try:
            if not self.record:
                return Buffered(call, inputs)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            ordered = module is step.network and step.unrepeatable is None
            with repeatable_kernels(), fixed_order() if ordered else nullcontext():
                return Recording(call, inputs, self._pool, step.stream)
        except Exception as error:  # whatever stands in the way, the plain call gives the same numbers
            reason = first_line(error)
            self._known.clear()  # which share the memory that was let go of
            self._pool = None
        finally:
            step.wait()
            step.aside += time.perf_counter() - begun
        if not self.reasons:
            warnings.warn(
                f"what the sampler computes around a step ({kind}) runs kernel by kernel, which is slower: {reason}",
                RuntimeWarning,
                stacklevel=2,
            )
        self.reasons[kind] = reason
        return None


class RecordedLosses:
    """`losses(rows, u)` of one batch; recorded, unless gradients are to flow through them.

    Args:
        probes: the recordings.
        x0: the batch.
        labels: its classes, if it has any.
        precision: what the network computes in; by default as in training.
    """

    def __init__(self, probes: Probes, x0: Tensor, labels: Tensor | None, precision: str | None = None) -> None:
        self.probes, self.x0, self.labels, self.precision = probes, x0, labels, precision

    def __call__(self, rows: Any, u: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.probes.losses(*self._rows(rows), u, self.precision)
        with computing_in(self.precision, self.probes.step.network):
            return self.probes.step.loss_at(self.x0, self.labels)(rows, u)

    def at_precision(self, precision: str) -> "RecordedLosses":
        """The same with the network computing in this precision."""
        return RecordedLosses(self.probes, self.x0, self.labels, precision)

    def gradients(self, rows: Any, u: Tensor, weight: Tensor) -> list[tuple[nn.Parameter, Tensor]] | None:
        """Those of the weighted sum of losses, by parameter, until they are asked for again; None where they cannot be had."""
        return None if self.precision is not None else self.probes.gradients(*self._rows(rows), u, weight)

    def _rows(self, rows: Any) -> tuple[Tensor, Tensor | None]:
        return self.x0[rows], None if self.labels is None else self.labels[rows]
