"""The arithmetic of a step as two CUDA graphs: gradients, and all that follows, around which the sampler watches.

A small model's step is hundreds of kernels of a few microseconds: launching them one by one takes longer than running them.
A graph is launched once. Its inputs lie in fixed buffers, numbers that change from step to step (learning rate, decay of the
average) too. Noise and dropout come from torch's generator, whose seed a graph reads when it is launched: the same seed gives
the same step, captured or not, now or after a resume.
"""

import gc
import os
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from noisewise.feedback import put_back, replaying
from noisewise.models import with_labels
from noisewise.precision import convolutions
from noisewise.samplers import Draw, Sampler
from noisewise.samplers.base import LossAt
from noisewise.training.fast import blocks
from noisewise.training.fast.fuse import compiler_options, unfuse
from noisewise.training.fast.update import FusedMove, fused_move
from noisewise.training.step import Step, first_line

WARM_UP = 3  # steps before the capture: compilation, choice of kernels, state of the optimizer
MODE = "thread_local"  # other threads may go on using the device, such as one that reads data ahead
REPEATABLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
FIELDS = ("u", "time", "weight", "density")
generators = 0  # how often torch's generator was given another state, which no graph recorded before reads


class GraphedStep(Step):
    """As `Step`; in graphs, from the moment that `capture` has been called."""

    graphed = True
    fused: FusedMove | None = None  # what moves the weights while it is recorded
    in_graph: FusedMove | None = None  # what the graph then holds
    unrepeatable: str | None = None  # what of the network adds in no fixed order, if anything does
    stream: torch.cuda.Stream | None = None  # on which all graphs are recorded
    try_cudnn = True  # whether attention may be cuDNN's
    as_a_whole = False  # compile the model at once, though it has blocks that could share their code

    def make_ready(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        if not self.ready:
            self._record(tell)
        if not self.ready:
            super().make_ready(tell)

    def _record(self, tell: Callable[[str], None]) -> None:
        """Capture; where that cannot be done it stays a plain step."""
        tell("compiling and recording the training step: up to two minutes, less the next time")
        try:
            self._capture_somehow(tell)
        except Exception as error:
            if self.config.fast == "always":
                raise
            unfuse(self.model)  # our kernels may be what does not run
            if self.config.compile:
                self.model.compile(dynamic=False)
            tell(f"the plain path, not the fast one: the step cannot be recorded ({first_line(error)})")
        if self.ready and self.unrepeatable is not None:
            tell(f"a resumed run will be the same up to rounding, not bit for bit: {self.unrepeatable}")

    @property
    def by_region(self) -> bool:
        """Whether blocks are compiled, not the model."""
        return not self.as_a_whole and bool(blocks.regions(self.model))

    def _capture_somehow(self, tell: Callable[[str], None]) -> None:
        """Capture; a transformer first gives up cuDNN's attention, then kernels of ours and blocks that share their code."""
        while True:
            try:
                return self.capture()
            except Exception as error:
                if not self.by_region:
                    raise
                if blocks.attends_by_cudnn(self.model):
                    self.try_cudnn, instead = False, "attention is torch's own"
                    blocks.attend_by_cudnn(self.model, False)
                else:
                    self.as_a_whole, instead = True, "the transformer is compiled as a whole, without kernels of ours"
                    unfuse(self.model)
                tell(f"{instead}: what is faster cannot be recorded here ({first_line(error)})")

    def capture(self, *, record: bool = True) -> None:
        """Compile, warm up and record, leaving all state of training as it was; raises whatever stands in the way.

        With `record=False` the same arithmetic runs on the same fixed buffers as separate kernels: for tests without CUDA.
        """
        batch, count = self.config.batch, self.config.micro_batch
        self.x0 = torch.zeros(count, *self.parts.source.shape, device=self.device)
        self.labels = torch.zeros(count, dtype=torch.int64, device=self.device) if self.parts.classes else None
        u, ones = (torch.arange(batch, device=self.device) + 0.5) / batch, torch.ones(batch, device=self.device)
        self.all = Draw(u, self.objective.process.time(u), ones, ones.clone(), rows=count)
        self.u, self.weight = u[:count].clone(), ones[:count].clone()
        self.losses = torch.zeros_like(u)
        self.buffers_before = [buffer.clone() for buffer in self.running_buffers]
        # a number that stays is recorded as it is, one that changes lies in a tensor
        self.blend = torch.zeros((), device=self.device) if self.ema.changes else 1 - self.ema.decay()
        self.compiled = self._compiled() if record else self.call
        self.network.train()
        with self._state_put_back():
            self.run_gradients, self.run_update = self._recorded() if record else (self._gradients, self._update)
        self.gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        from noisewise.training.fast.probes import Probes  # which needs what is defined below

        self.prober = Probes(self, record)
        self.generators = generators
        self.micro, self.ready = 0, True

    def _compiled(self) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        if self.by_region:
            return blocks.compiled_by_region(self.model, self.call)
        compiled = torch.compile(self.model, dynamic=False, options=compiler_options())
        return with_labels(cast(nn.Module, compiled))

    def _recorded(self) -> tuple[Callable[[], None], Callable[[], None]]:
        # on a stream of its own from the first step on: autograd remembers the stream on which a parameter was first used
        self.stream = stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        gradients, update = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(stream), repeatable_kernels() if self.config.deterministic else any_kernels():
            self._choose_attention()
            self._first_gradients()
            for _ in range(WARM_UP):
                self._gradients()
                self._update()
            # what waits cannot be recorded, and a recording that fails is hard to recover from
            with waiting_is_an_error(), host_chance_is_an_error():
                self._gradients()
                self._update()
            try:
                self.fused = self._fused_move()
                self._update()  # for kernels are compiled and loaded outside of a recording
                with without_collection(), torch.cuda.graph(gradients, pool=pool, stream=stream, capture_error_mode=MODE):
                    self._gradients()
                self.fused = self.in_graph = self._fused_move()  # with gradients where the graph will write them
                with without_collection(), torch.cuda.graph(update, pool=pool, stream=stream, capture_error_mode=MODE):
                    self._update()
            except Exception:
                recover(self.device, pool)
                raise
            finally:
                self.fused = None  # not for steps outside of graphs, whose gradients lie elsewhere
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return gradients.replay, update.replay

    def _fused_move(self) -> FusedMove | None:
        return fused_move(self.optimizer, self.ema.pairs(), self.config.optimizer.clip)

    def _choose_attention(self) -> None:
        """cuDNN's, where torch would choose it too if it knew that its order of adding does not matter here."""
        wanted = self.try_cudnn and self.by_region and self.config.deterministic
        if not wanted or self.accelerator.mixed_precision != "bf16":
            return
        with fixed_order():
            if blocks.cudnn_repeats(self.model, self.config.micro_batch, self.device):
                blocks.attend_by_cudnn(self.model)

    def _first_gradients(self) -> None:
        """Find out whether all of the network can be held to a fixed order of adding."""
        self.unrepeatable = None
        try:
            self._gradients()
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            self.unrepeatable = str(error).strip().splitlines()[0]
            self._gradients()

    # The two halves, on fixed buffers -------------------------------------------------------------------------------

    def _gradients(self) -> None:
        if self.config.accumulation == 1:
            self.drop_gradients()  # new ones come to lie at the same place in every replay
        losses = self.loss_at(self.x0, self.labels, self.compiled)
        fixed = self.config.deterministic and self.unrepeatable is None
        with fixed_order() if fixed else nullcontext():  # both passes: they are compiled together
            self.micro_losses = self.differentiate(losses, self.u, self.weight)

    def _update(self) -> None:
        self.apply(self.all, self.losses, self.blend)

    def move(self, norm: Tensor, finite: Tensor, blend: float | Tensor) -> None:
        if self.fused is None:
            super().move(norm, finite, blend)
        else:
            self.fused(norm, finite, blend)

    # What the trainer calls -----------------------------------------------------------------------------------------

    def draw(self, sampler: Sampler, x0: Tensor) -> Draw:
        if not self.ready:
            return super().draw(sampler, x0)
        with replaying(self.prober.replay):
            return sampler.sample(x0)

    def probes(self, x0: Tensor, labels: Tensor | None) -> LossAt:
        return self.prober.of(x0, labels) if self.ready else super().probes(x0, labels)

    def clear(self) -> None:
        if self.ready and self.generators != generators:
            self._record_anew()
        if not self.ready:
            super().clear()
            return
        if isinstance(self.blend, Tensor):
            self.blend.fill_(1 - self.ema.decay())
        if self.config.accumulation > 1:  # otherwise each replay writes them anew
            self._zero_gradients()
        if self.running_buffers:
            torch._foreach_copy_(self.buffers_before, self.running_buffers)
        self.micro = 0

    def _record_anew(self) -> None:
        """The step's graphs would go on with the generator's old state, and so with one noise for good."""
        reasons, self.ready, self.gradients = self.prober.reasons, False, []
        del self.prober, self.run_gradients, self.run_update  # their memory is needed again
        self.drop_gradients()
        self._record(self.tell)
        if self.ready:
            self.prober.reasons = reasons

    def _zero_gradients(self) -> None:
        """Also where the graph adds to them while the parameters do not show them (`set_aside_gradients`)."""
        shown = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        every = {id(gradient): gradient for gradient in (*self.gradients, *shown)}
        if every:
            torch._foreach_zero_(list(every.values()))

    def backward(self, x0: Tensor, labels: Tensor | None, draw: Draw, last: bool = True) -> Tensor:
        if not self.ready:
            return super().backward(x0, labels, draw, last)
        part = slice(self.micro * len(x0), (self.micro + 1) * len(x0))
        targets = [self.x0, self.u, self.weight, *(getattr(self.all, name)[part] for name in FIELDS)]
        values = [x0, draw.u, draw.weight, *(getattr(draw, name) for name in FIELDS)]
        torch._foreach_copy_(targets, values)
        if self.labels is not None and labels is not None:
            self.labels.copy_(labels)
        self.run_gradients()
        self.losses[part].copy_(self.micro_losses)
        self.micro += 1
        return self.losses[part]

    def update(self, draws: Sequence[Draw], losses: Sequence[Tensor]) -> None:
        if not self.ready:
            super().update(draws, losses)
            return
        self.run_update()
        self.ema.updates += 1

    # ----------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _state_put_back(self) -> Iterator[None]:
        """Whatever training changes is as before after the block, at the same places in memory."""
        tensors = [tensor for module in self.modules().values() for tensor in (*module.parameters(), *module.buffers())]
        tensors += self.ema.average.values()
        tensors += self._optimizer_state()
        running = self.monitor.running
        calls = running.calls
        known = {id(tensor) for tensor in tensors}
        try:
            with put_back(tensors):
                yield
        finally:
            with torch.no_grad():
                for tensor in self._optimizer_state():
                    if id(tensor) not in known:  # made by the first step: Adam begins with zeros
                        tensor.zero_()
            running.calls = calls
            self.guard.forget()

    def _optimizer_state(self) -> list[Tensor]:
        return [value for state in self.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


@contextmanager
def repeatable_kernels() -> Iterator[None]:
    """The same convolutions in every process, which always add in the same order; attention is left to kernels that can do so
    too. Thus a run goes on bit for bit. What this costs is in docs/speed.md."""
    with convolutions(deterministic=True), sdpa_kernel(REPEATABLE):
        yield


def any_kernels() -> AbstractContextManager[None]:
    """cuDNN chooses convolutions by trial, also such as add in no fixed order, and torch any attention."""
    return convolutions(deterministic=False)


@contextmanager
def fixed_order() -> Iterator[None]:
    """In the block torch takes kernels that always add in the same order, slower ones if need be, or raises where it has none.

    Not a warning instead: with that attention keeps to atomic additions. cuBLAS is asked for a workspace of its own for every
    stream, as torch demands.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    switches: Any = torch.utils.deterministic
    before, fill = torch.get_deterministic_debug_mode(), switches.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    switches.fill_uninitialized_memory = False  # filling would only cost time
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        switches.fill_uninitialized_memory = fill


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """In the block, anything that makes the host wait for the device raises."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def host_chance_is_an_error() -> Iterator[None]:
    """In the block, random numbers of the host are an error: a graph would repeat for good what was decided by them."""
    before = _host_generators()
    yield
    moved = [name for name, state in _host_generators().items() if state != before[name]]
    if moved:
        raise RuntimeError(f"random numbers were drawn on the host ({moved[0]}), which a recording would do only once")


def _host_generators() -> dict[str, bytes]:
    states = {"random": random.getstate(), "numpy.random": np.random.get_state(), "torch": torch.get_rng_state().numpy()}
    return {name: pickle.dumps(state) for name, state in states.items()}


@contextmanager
def without_collection() -> Iterator[None]:
    """No garbage is collected inside the block: the memory of an earlier run's graphs, freed in a recording, would end it."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def recover(device: torch.device, pool: tuple[int, int]) -> None:
    """A recording into this pool failed; torch may believe that it still goes on."""
    recover_generator(device)
    recover_allocator(device, pool)


def recover_generator(device: torch.device) -> None:
    """If torch's generator is still recorded from, give it a state that is not.

    Only then, as this has a price: graphs recorded before would read the old state, and its seed, for good.
    """
    try:
        torch.rand((), device=device)
    except RuntimeError:
        global generators
        generator = torch.cuda.default_generators[device.index or 0]
        generator.graphsafe_set_state(generator.clone_state())
        generators += 1


def recover_allocator(device: torch.device, pool: tuple[int, int]) -> None:
    """If torch's allocator still serves the recording, end that, and let go of the pool: both are left out by torch where the
    end of a recording fails (pytorch issue 180395). Until then it gives no cached memory back, not even before it runs out."""
    index = torch.cuda.current_device() if device.index is None else device.index
    calls: Any = torch._C
    end = getattr(calls, "_cuda_endAllocateToPool", None) or calls._cuda_endAllocateCurrentStreamToPool  # before torch 2.8
    try:
        end(index, pool)
    except RuntimeError:  # torch has ended it
        return
    calls._cuda_releasePool(index, pool)
