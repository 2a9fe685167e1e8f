"""Two ranks train with Accelerate, accumulating two batches; each writes digests of its draws and its sampler's states."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator

from noisewise.integrations.accelerate import Accelerated
from tests.integrations.problem import BATCH, SPECS, accelerated_batch, data, digest, network, sampler_of, seed
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
    dist.barrier()
    finish(out, result)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
