"""A training run from its first step to its last, with all that surrounds the steps: folder, checkpoints, pictures, signals."""

import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from noisewise import distributed
from noisewise.models.build import MODELS, remember
from noisewise.plain_files import inside
from noisewise.training import checkpoint
from noisewise.training.components import Parts, build_parts, with_network
from noisewise.training.config import AUTO, Config
from noisewise.training.display import Progress
from noisewise.training.ema import mostly_initial
from noisewise.training.guard import Diverged
from noisewise.training.options import flat, load_config
from noisewise.training.parallel import make_accelerator
from noisewise.training.run_folder import RunFolder
from noisewise.training.saving import Pending, Saver, begin_shards
from noisewise.training.signals import StopRequest
from noisewise.training.trainer import Trainer

AGREE_EVERY = 10  # steps between two questions to all processes, such as whether one was asked to stop, at the most
AGREE_SECONDS = 1.0  # between two of them, unless a step takes longer: torchrun kills 30 s after SIGTERM
NOTHING = float("inf")

DrawSamples = Callable[["Run"], object]


def default_folder(config: Config) -> Path:
    """runs/NAME-SAMPLER-SEED, with the sampler's spec made fit for a file name."""
    check_name(config.name)
    sampler = re.sub(r"[^A-Za-z0-9._=+-]+", "-", config.sampler).strip("-")
    return Path("runs") / f"{config.name}-{sampler}-{config.seed}"


def check_name(name: str) -> None:
    """A run's name becomes part of paths, so it must not lead elsewhere."""
    if Path(name).is_absolute() or ".." in Path(name).parts or not name.isprintable():
        raise ValueError(f"--name {name!r} leads out of the folder of runs, or cannot be printed: choose another")


class Run:
    """A run in its folder: opens or resumes it, then `advance()` trains.

    Args:
        config: all settings.
        resume: continue what is in the folder (and begin if there is nothing).
        progress: what shows the user how it goes.
        step: continue from the checkpoint of this step, not from the newest good one; later ones are set aside.
        draw: called with the run every `log.samples_every` steps and at the end, as
            `noisewise.generation.run_samples.draw_samples`; None for no pictures.
    """

    def __init__(
        self,
        config: Config,
        *,
        resume: bool = False,
        step: int | None = None,
        progress: Progress | None = None,
        draw: DrawSamples | None = None,
    ) -> None:
        config.check()
        self.draw = draw
        self.progress = progress or Progress()
        self.folder = RunFolder(Path(config.out) if config.out else default_folder(config))
        self.config = config = _with_stored_network(config, self.folder.config_file) if resume else config
        self.accelerator = make_accelerator(config, str(self.folder.path))
        self.main = self.accelerator.is_main_process
        self._new = self.main and not self.folder.config_file.exists()
        self._changed: list[str] = []
        self._warned = False  # of an average that is mostly initial weights
        self.stopped = False  # it was asked to end, perhaps in another process
        self._saved: float = NOTHING  # the step of the last checkpoint, until others were removed for it
        self._saver = Saver()
        self._pending: Pending | None = None  # the save in the background
        self._agreeing = True  # whether processes ask one another after this step
        self._agree_at = 0  # and the step of the next time
        with distributed.together():
            if self.main:
                self._changed = self.folder.begin(config, resume)
                checkpoint.sweep(self.folder.checkpoints)
        if self._new:
            remember(config.model.name)  # the folder has named nothing yet, so the user has
        try:
            parts = build_parts(config)
            self.config = config = self._resolved(config, parts)
            self.trainer = Trainer(config, parts, self.accelerator, self.progress.tell)
            self._begin_from(self._found(step) if resume else None)
            self.trainer.tensors(gather=False)  # what cannot be saved is known now, not at the first checkpoint
            self.trainer.state()
            if self.main and config.steps >= self.trainer.step:
                self.folder.write_config(config)
        except BaseException:
            self.forget()
            self.folder.end()
            raise
        if config.log.trackers:
            self._begin_trackers()

    def _begin_trackers(self) -> None:
        name = self.config.name
        check_name(name)
        inside(self.folder.path, self.folder.path / name)
        plain = (int, float, str, bool)  # what trackers take
        settings = {key: value if isinstance(value, plain) else str(value) for key, value in flat(self.config).items()}
        self.accelerator.init_trackers(name, settings)

    def _resolved(self, config: Config, parts: Parts) -> Config:
        """The configuration with all that follows from the data; tells which network was picked."""
        found = with_network(config.for_data(len(parts.source)), parts.source.shape)
        if found.model != config.model:
            count = sum(parameter.numel() for parameter in parts.model.parameters())
            shape = "x".join(map(str, parts.source.shape))
            self.progress.tell(
                f"the network: {found.model.name} {found.model.options}, {count:,} parameters, picked for {shape} on "
                f"{self.accelerator.device.type}; choose another with --model.name and --model.options"
            )
        return found

    def _found(self, step: int | None) -> checkpoint.Checkpoint | None:
        lazy = self.config.parallel == "fsdp"  # no rank holds the whole
        if step is None:
            return checkpoint.newest_for_all(self.folder.checkpoints, self.progress.tell, lazy)
        with distributed.together():
            return checkpoint.named(self.folder.checkpoints, step, lazy)

    def _begin_from(self, found: checkpoint.Checkpoint | None) -> None:
        if found is not None:
            self.trainer.load(found)
            before, now = found.state["processes"], distributed.world_size()
            changed = f" (with {now} processes instead of {before}: not bit for bit)" if before != now else ""
            if self.trainer.finished():
                length = "--steps" if self.config.epochs is None else "--epochs"
                more = length if found.step >= self.config.steps else "--seconds"
                self.progress.tell(f"{self.folder.path} ended at step {found.step}: nothing to do; more {more} would go on")
            else:
                others = f", with {'; '.join(self._changed)}" if self._changed else ""
                self.progress.tell(f"resuming {self.folder.path} at step {found.step}{changed}{others}")
            if self.main:
                checkpoint.set_aside_after(self.folder.checkpoints, found.step)
        if self.main:
            self.folder.forget_after(found.step if found is not None else 0, self.progress.tell)

    def advance(self, stop: StopRequest | None = None) -> Iterator[int]:
        """Train, yielding the step after each; ends at the end of the budget or, checkpoint saved, when asked to stop."""
        trainer, config = self.trainer, self.config
        began = trainer.step, trainer.seconds
        for row in self._rows():
            self._plan_agreement(*began)
            self.settle()
            if self._saved < trainer.step and not self._failing():  # a step was made from what was saved last: it is good
                self._prune()
            if row is not None:
                self._log(row)
            if config.log.samples_every and trainer.step % config.log.samples_every == 0:
                self._draw_samples()
            if trainer.step % config.checkpoint.every == 0 and trainer.step != config.steps and not self._failing():
                self.save(wait=False)
            self.progress.step(trainer.step, trainer.seconds)
            if stop is not None and self._asked(stop):
                self.save()
                self.stopped = True
                return
            yield trainer.step
        self.save()
        self._prune()
        if config.log.samples_every and trainer.step % config.log.samples_every:
            self._draw_samples()

    def _rows(self) -> Iterator[dict[str, Any] | None]:
        """Training; when steps keep failing, what may make them fail is set aside, and the error says where to go on."""
        try:
            yield from self.trainer.run()
        except Diverged as error:
            left = None
            try:
                self.settle(wait=True)
            except (checkpoint.CheckpointError, OSError) as unsaved:
                self.progress.tell(str(unsaved))
            with distributed.together():
                if self.main:
                    left = checkpoint.set_aside_diverged(self.folder.checkpoints, self.trainer.step - self._failing())
            go_on = f"--resume goes on from {left}, the newest before" if left else "there is no checkpoint from before"
            raise Diverged(f"{error}; {go_on}" if self.main else str(error)) from None

    def _failing(self) -> int:
        """How many steps in a row, up to now, were skipped; waits for the device."""
        return int(self.trainer.guard.run)

    def _draw_samples(self) -> None:
        if self.draw is not None:
            self.draw(self)

    def _asked(self, stop: StopRequest) -> bool:
        if distributed.world_size() == 1:
            return stop.requested
        return self._agreeing and bool(distributed.largest(int(stop.requested), self.accelerator.device))

    def _plan_agreement(self, step: int, seconds: float) -> None:
        """Whether processes ask one another after this step, the same on all; `step` and `seconds` are those of the start."""
        self._agreeing = self.trainer.step >= self._agree_at
        if self._agreeing and distributed.world_size() > 1:
            pace = (self.trainer.seconds - seconds) / max(1, self.trainer.step - step)
            slowest = distributed.largest(int(1000 * pace), self.accelerator.device)
            self._agree_at = self.trainer.step + max(1, min(AGREE_EVERY, int(1000 * AGREE_SECONDS) // max(1, slowest)))

    def _log(self, row: dict[str, Any]) -> None:
        with distributed.together():
            if self.main:
                self.folder.log(row)
        if self.config.log.trackers:
            self.accelerator.log(_tracked(row), step=row["step"])
        self.progress.row(row)

    def save(self, wait: bool = True) -> Path:
        """Write a checkpoint; without `wait` in the background, once the one before is written."""
        self.settle(wait=True)
        tensors, step = self.trainer.tensors(gather=False), self.trainer.step
        state, failing = self.trainer.state(), self._failing()
        if any(distributed.is_sharded(value) for values in tensors.values() for value in values.values()):
            self._pending = begin_shards(self._saver, self.folder, step, tensors, state, failing)
        else:
            with distributed.together():
                if self.main:
                    self._saver.begin(tensors, lambda copies: self.folder.commit(step, copies, state, failing))
            self._pending = Pending(step)
        self.settle(wait=wait)
        return self.folder.checkpoints / checkpoint.name_of(step)

    def settle(self, wait: bool = False) -> None:
        """Take note of the end of a save in the background, and raise its error; all processes agree. `wait` for that end."""
        if self._pending is None:
            return
        if not wait and not self._agreeing:
            return  # it takes a question to all of them
        if not wait and distributed.largest(int(self._saver.busy), self.accelerator.device):
            return
        pending, self._pending = self._pending, None
        with distributed.together():
            found = self._saver.result()
        with distributed.together():
            pending.complete(found)
        self._saved = pending.step

    def _prune(self) -> None:
        """Remove the checkpoints that are no longer wanted."""
        self._saved = NOTHING
        with distributed.together():
            if self.main:
                checkpoint.prune(self.folder.checkpoints, self.config.checkpoint.keep, self.config.checkpoint.keep_every)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The network as it generates and is measured: averaged weights, evaluation mode, the run's precision."""
        warning = None if self._warned else mostly_initial(self.config.ema, self.trainer.ema.updates)
        if warning is not None:
            self._warned = True
            self.progress.tell(warning)
        self.trainer.network.eval()
        with self.trainer.ema.applied(), self.accelerator.autocast():
            yield

    def forget(self) -> None:
        """A start that failed must not look like a run when it is repeated, perhaps with other settings."""
        if self._new:
            self.folder.config_file.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of processes, trackers and the folder; a save in the background is finished first."""
        self._saver.wait()
        self.trainer.close()
        if self.config.log.trackers:
            self.accelerator.end_training()
        self.folder.end()


def train(
    config: Config,
    *,
    resume: bool = False,
    step: int | None = None,
    progress: Progress | None = None,
    draw: DrawSamples | None = None,
    stop: StopRequest | None = None,
) -> Path:
    """Train to the end, or until a signal asks to stop, and return the run's folder.

    The arguments are those of `Run`; `stop` is told of such a signal, for those who have to know.
    """
    with stop or StopRequest() as stop:
        with stop.at_once():
            run = Run(config, resume=resume, step=step, progress=progress, draw=draw)
        if resume and not run.trainer.step:
            run.progress.tell(f"there is nothing to resume in {run.folder.path}: a new run begins")
        try:
            with run.progress.running(run.config, run.trainer.step):
                if not run.trainer.finished():
                    with stop.at_once():
                        run.trainer.warm_up()
                for _ in run.advance(stop):
                    pass
            if run.stopped:
                run.progress.tell(
                    f"{stop.name or 'another process was asked to stop'}: saved at step {run.trainer.step}; go on with --resume"
                )
        except OSError as error:
            good = checkpoint.newest_name(run.folder.checkpoints)
            raise OSError(f"{error}; the last good checkpoint is {good or 'none yet'}, go on from it with --resume") from error
        finally:
            if run.trainer.step == 0:
                run.forget()
            run.close()
    return run.folder.path


def dry_run(config: Config, steps: int = 2) -> dict[str, Any]:
    """Build everything, make two steps on noise of the data's shape, and say what a run would take.

    The data need not be there, so epochs are not turned into steps.
    """
    config.check()
    accelerator = make_accelerator(config)
    trainer = Trainer(config, build_parts(config, synthetic=True), accelerator)
    times = []
    try:
        trainer.warm_up()
        for _ in range(steps):
            before = trainer.seconds
            trainer.timed_step()
            times.append(trainer.seconds - before)
        trainer.guard.check(1, "The model does not give finite losses at all")
    finally:
        trainer.close()
    cuda, model = accelerator.device.type == "cuda", with_network(config, trainer.parts.source.shape).model
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "network": " ".join(map(str, filter(None, (model.name, model.options)))),
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "sample_shape": list(trainer.parts.source.shape),
        "device": str(accelerator.device),
        "precision": "fp32" if accelerator.mixed_precision == "no" else accelerator.mixed_precision,
        "processes": distributed.world_size(),
        "batch": config.batch,
        "memory_gib": round(peak / 2**30, 3),
        "memory_of": "GPU, largest allocation" if cuda else "this process, largest resident size",
        "seconds_per_step": round(times[-1], 4),
        "loss": trainer.guard.means()[0],
    }


def _with_stored_network(config: Config, file: Path) -> Config:
    """A run that goes on keeps the network that "auto" was when it began."""
    if config.model.name != AUTO or config.model.options or not file.exists():
        return config
    stored = load_config(file).model
    return (
        replace(config, model=replace(config.model, name=stored.name, options=stored.options))
        if stored.name in MODELS
        else config
    )


def _tracked(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row of metrics; lists by noise level become one number each."""
    numbers: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, list):
            numbers |= {f"{key}/{i}": number for i, number in enumerate(value) if number is not None}
        elif isinstance(value, int | float) and key != "step":
            numbers[key] = value
    return numbers
