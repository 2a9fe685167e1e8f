"""What samplers ask of the network around a step, recorded and replayed: losses and gradients of rows at other noise levels.

A sampler that probes asks for the same few shapes again and again. Each is recorded at its first use, with the kernels of the
network itself and not compiled once more: the noise and the dropout of a seed are those of the plain path, and so are the
numbers, up to the choice of convolutions. Graphs share the memory of the step's own.
"""

import time
import warnings
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from noisewise.feedback import computing_in
from noisewise.training.fast.graphs import fixed_order, repeatable_kernels
from noisewise.training.fast.recording import Buffered, Premise, Recording, against
from noisewise.training.step import first_line

if TYPE_CHECKING:
    from noisewise.training.fast.graphs import GraphedStep

KEPT = 16  # recordings, of which all share one memory


class Probes:
    """Recordings of a step's network.

    What cannot be recorded is called kernel by kernel for good, after one warning; `why_not` says why.

    Args:
        step: whose network, precision, stream and memory they have.
        record: without it the same arithmetic runs on the same fixed buffers as separate kernels, for tests without CUDA.
    """

    def __init__(self, step: "GraphedStep", record: bool = True) -> None:
        self.step, self.record = step, record
        self.parameters = [value for value in step.network.parameters() if value.requires_grad]
        self.why_not: str | None = None
        self._known: dict[Hashable, Buffered] = {}  # latest use last
        self._premise = Premise(step.network)

    @property
    def recorded(self) -> int:
        """How many recordings there are."""
        return len(self._known)

    def of(self, x0: Tensor, labels: Tensor | None) -> "RecordedLosses":
        """The function that gives losses of this batch's rows at any noise levels."""
        return RecordedLosses(self, x0, labels)

    def losses(self, x0: Tensor, labels: Tensor | None, u: Tensor, precision: str | None = None) -> Tensor:
        """One a sample, without gradients."""
        call = partial(self._losses, precision)
        found = self._recording(("losses", precision), call, (x0, labels, u))
        return call(x0, labels, u) if found is None else found(x0, labels, u).clone()

    def gradients(
        self, x0: Tensor, labels: Tensor | None, u: Tensor, weight: Tensor
    ) -> list[tuple[nn.Parameter, Tensor]] | None:
        """Of the weighted sum of losses, for each parameter that has one; overwritten by the next call. None: not recorded."""
        found = self._recording("gradients", self._gradients, (x0, labels, u, weight))
        if found is None:
            return None
        values = found(x0, labels, u, weight)
        return [(one, value) for one, value in zip(self.parameters, values, strict=True) if value is not None]

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

    def _recording(self, kind: Hashable, call: Callable[..., Any], inputs: tuple[Tensor | None, ...]) -> Buffered | None:
        if self.why_not is not None:
            return None
        if not self._premise.holds():
            self._known.clear()
            self._premise = Premise(self.step.network)
        key = kind, tuple(None if value is None else (value.shape, value.dtype) for value in inputs)
        found = self._known.pop(key, None) or self._made(call, inputs)
        if found is not None:
            self._known[key] = found
            while len(self._known) > KEPT:
                del self._known[next(iter(self._known))]
        return found

    def _made(self, call: Callable[..., Any], inputs: tuple[Tensor | None, ...]) -> Buffered | None:
        """A recording, made off the clock; None where that fails, then and from then on."""
        step = self.step
        step.wait()
        begun = time.perf_counter()
        try:
            if not self.record:
                return Buffered(call, inputs)
            self.why_not = against(step.network)
            if self.why_not is None:
                with repeatable_kernels(), fixed_order() if step.unrepeatable is None else nullcontext():
                    return Recording(call, inputs, step.pool, step.stream)
        except Exception as error:  # whatever stands in the way, the plain call gives the same numbers
            self.why_not = first_line(error)
            step.stale = True
        finally:
            step.wait()
            step.aside += time.perf_counter() - begun
        self._known.clear()
        warnings.warn(
            f"the sampler's probes of the network are made kernel by kernel, which is slower: {self.why_not}",
            RuntimeWarning,
            stacklevel=2,
        )
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
