"""Two ranks train with Accelerate, accumulating two batches; each writes digests of its draws and its recipe's states."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator

import noisewise
from tests.integrations.problem import (
    BATCH,
    OBJECTIVE,
    SPECS,
    accelerated_batch,
    data,
    digest,
    network,
    recipe_of,
    seed,
)
from tests.workers.contracts import finish

STEPS = 4  # optimizer steps


class Run:
    def __init__(self, name, recipe=None):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, self.recipe = network(), recipe or recipe_of(name)
        optimizer = torch.optim.Adam([*model.parameters(), *self.recipe.parameters()], lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.recipe.attach(self.optimizer, self.model)
        self.accelerator.register_for_checkpointing(self.recipe)
        self.draws, self.states = [], []

    def steps(self, first, last):
        batches = data(self.accelerator.process_index).split(BATCH)
        for batch in range(2 * first, 2 * last):
            x0 = batches[batch % len(batches)]
            seed(self.accelerator.process_index, batch)
            draw = accelerated_batch(self, x0)
            self.draws.append(digest({"u": draw.u}))
            self.states.append(digest(self.recipe.state_dict()) if batch % 2 else "")
        return self


def learned() -> list[str]:
    """Digests of what was trained, before and after: a weighting that learns, outside of the prepared model."""
    run = Run("adaptive", noisewise.recipe("adaptive:warmup=1,every=1+learned", OBJECTIVE))
    before = digest(run.recipe.weighting.state_dict())
    run.steps(0, STEPS)
    whole = run.accelerator.unwrap_model(run.model)
    return [before, digest(run.recipe.weighting.state_dict()), digest(whole.state_dict())]


def main(out: Path) -> None:
    result = {}
    for name in SPECS:
        run = Run(name).steps(0, STEPS // 2)
        run.accelerator.save_state(str(out / name))
        run.accelerator.wait_for_everyone()
        run.steps(STEPS // 2, STEPS)
        again = Run(name)
        again.accelerator.load_state(str(out / name))
        again.steps(STEPS // 2, STEPS)
        ranks = run.accelerator.num_processes
        result[name] = {"ranks": ranks, "draws": run.draws, "states": run.states, "resumed": again.states[-1]}
    result["learned"] = learned()
    dist.barrier()
    finish(out, result)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
