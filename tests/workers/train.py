"""Two ranks train in every way that a run can be spread; each writes digests of what it holds.

`out`/one holds a run of one process, four steps long, for each way: both ranks go on with it.
"""

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from noisewise.generation.run_samples import draw_samples
from noisewise.training.parallel import make_accelerator
from noisewise.training.run import Run
from tests.training.tiny import own, tiny, trainer_of
from tests.workers.contracts import digest, finish

PARALLEL = ("ddp", "fsdp")
SAMPLERS = {
    "adaptive": "adaptive:warmup=2,every=2",
    "policy": "adaptive:estimator=reinforce,every=2,strata=20,queue=4,floor=0.2",
    "lookahead": "adaptive:estimator=lookahead,strata=3,horizon=2,budget=1,probe=32,warmup=2",
    "gradients": "gradient_variance:strata=3,every=2,rows=4",
    "learned": "uniform+learned",
}


def settings(name: str, folder: Path, **changes):
    """Eight steps with two micro-batches, checkpoints at 4 and 8, pictures once."""
    config = tiny(sampler=SAMPLERS[name], steps=8, accumulation=2, out=str(folder), **changes)
    return replace(
        config,
        checkpoint=replace(config.checkpoint, every=4),
        log=replace(config.log, samples_every=4 if name == "adaptive" else 0),
    )


def trained(config, resume: bool = False) -> dict:
    """Train, and say what this rank holds: the digest of each part, and the last row of metrics."""
    run = Run(config, resume=resume, draw=draw_samples)
    began, rows = run.trainer.step, []
    held = run.trainer.tensors() if resume else {}
    loaded = {part: digest(values[name] for name in sorted(values)) for part, values in held.items()}
    run._log, log = (lambda row: (rows.append(row), log(row))), run._log
    for _ in run.advance():
        pass
    parts = {name: digest(values.values()) for name, values in run.trainer.tensors().items()}
    row = {key: value for key, value in rows[-1].items() if key not in ("seconds", "steps_per_second")}
    run.close()
    return {"began": began, "step": run.trainer.step, "loaded": loaded, "parts": parts, "row": row}


def first_gradient() -> dict:
    """What this rank saw in one step of DDP, and the gradient of all ranks."""
    config = tiny(model=own("Recording"))
    trainer = trainer_of(replace(config, optimizer=replace(config.optimizer, clip=None)))
    x0 = trainer.batches.get(0)[0]
    trainer.training_step()
    gradient = [parameter.grad.flatten().tolist() for parameter in trainer.model.parameters()]
    return {"x0": x0.tolist(), "time": trainer.model.seen[0][1].tolist(), "gradient": gradient}


def main(out: Path) -> None:
    make_accelerator(tiny())  # starts the process group
    result: dict = {"runs": {}, "resumed": {}}
    for parallel in PARALLEL:
        for name in SAMPLERS:
            result["runs"][f"{parallel}/{name}"] = trained(settings(name, out / parallel / name, parallel=parallel))
        folder = out / "one" / parallel
        result["resumed"][parallel] = trained(settings("adaptive", folder, parallel=parallel), resume=True)
    result["first"] = first_gradient()
    result["processes"] = dist.get_world_size()
    try:
        trainer_of(tiny(batch=5))
    except ValueError as error:
        result["odd"] = str(error)
    try:  # what fails in the main process fails in both, and leaves none waiting
        Run(settings("adaptive", out / "ddp" / "adaptive"))
    except Exception as error:
        result["refused"] = f"{type(error).__name__}: {error}"
    finish(out, result)
