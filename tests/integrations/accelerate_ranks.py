"""Two ranks train with Accelerate, accumulating two batches; each writes digests of its draws and its sampler's states."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator

import noisewise
from noisewise.integrations.accelerate import Accelerated
from tests.integrations.problem import (
    BATCH,
    OBJECTIVE,
    SPECS,
    accelerated_batch,
    data,
    digest,
    losses_of,
    network,
    sampler_of,
    seed,
)
from tests.workers.contracts import finish

STEPS = 4  # optimizer steps


class Run:
    def __init__(self, name):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = network()
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2))
        self.sampler = Accelerated(self.accelerator, sampler_of(name)).attach(self.model, self.optimizer)
        self.draws, self.states = [], []

    def steps(self, first, last):
        batches = data(self.accelerator.process_index).split(BATCH)
        for batch in range(2 * first, 2 * last):
            x0 = batches[batch % len(batches)]
            seed(self.accelerator.process_index, batch)
            draw = accelerated_batch(self, x0)
            self.draws.append(digest({"u": draw.u}))
            self.states.append(digest(self.sampler.sampler.state_dict()) if batch % 2 else "")
        return self


class Trained(torch.nn.Module):
    """The network and a weighting that learns, as in docs/accelerate.md."""

    def __init__(self, weighting):
        super().__init__()
        self.network, self.weighting = network(), weighting

    def forward(self, x0, u):
        losses = losses_of(self.network, x0, u)
        return losses, self.weighting.weighted(losses, OBJECTIVE, u)


def learned() -> list[str]:
    """Digests of what was trained, before and after."""
    accelerator, recipe = Accelerator(cpu=True), noisewise.recipe("adaptive:warmup=1,every=1+learned", OBJECTIVE)
    trained = Trained(recipe.weighting)
    before = digest(trained.weighting.state_dict())
    trained, optimizer = accelerator.prepare(trained, torch.optim.Adam(trained.parameters(), lr=1e-2))
    sampler = Accelerated(accelerator, recipe.sampler)
    for batch, x0 in enumerate(data(accelerator.process_index).split(BATCH)):
        seed(accelerator.process_index, batch)
        draw = sampler.sample(x0)
        losses, weighted = trained(x0, draw.u)
        accelerator.backward((draw.weight * weighted).mean())
        with sampler.observe(draw, losses):
            optimizer.step()
        optimizer.zero_grad()
    whole = accelerator.unwrap_model(trained)
    return [before, digest(whole.weighting.state_dict()), digest(whole.network.state_dict())]


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
