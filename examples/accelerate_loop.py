"""Accelerate: gradient accumulation, several processes, a checkpoint that holds the recipe.

Run it: python examples/accelerate_loop.py
or in two processes: torchrun --nproc-per-node=2 examples/accelerate_loop.py
"""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import noisewise
from noisewise import DDPM, Objective

objective = Objective(DDPM.linear(), "eps")


class Network(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        phase = time[:, None] / 1000 * torch.pi / 2
        return self.layers(torch.cat([x, phase.sin(), phase.cos()], 1))


class Training:
    """What a script has at its top level: accelerator, model, optimizer, data and the recipe."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)  # without cpu=True: the GPUs
        set_seed(0)
        angle = torch.rand(8192) * 6.28
        points = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(8192, 2)
        model = Network()
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        loader = DataLoader(TensorDataset(points), batch_size=64)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.recipe = noisewise.recipe("adaptive", objective, warmup=50, every=10)  # not prepared
        self.recipe.attach(self.optimizer)
        self.accelerator.register_for_checkpointing(self.recipe)

    def epoch(self, number: int) -> Tensor:
        set_seed(number, device_specific=True)
        for (x0,) in self.loader:
            with self.accelerator.accumulate(self.model):
                draw = self.recipe.sample(x0)
                losses = objective.losses(self.model, x0, draw.u)
                self.accelerator.backward(self.recipe.loss(draw, losses))
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self.recipe.sampler.density((torch.arange(5, device=self.accelerator.device) + 0.5) / 5)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run = Training()
    say = run.accelerator.print
    folder = broadcast_object_list([tempfile.mkdtemp()])[0]  # the same on all processes
    for number in range(4):
        density = run.epoch(number)
        steps = run.recipe.sampler.step
        say(f"epoch {number}: {steps} optimizer steps, density in fifths {[round(float(d), 2) for d in density]}")
        if number == 1:
            run.accelerator.save_state(folder)
    run.accelerator.wait_for_everyone()

    again = Training()
    again.accelerator.load_state(folder)
    again.epoch(2)
    same = torch.equal(again.epoch(3), density)
    say(f"{run.accelerator.num_processes} process(es); resumed after epoch 1 the density is the same bit for bit: {same}")
    run.accelerator.end_training()
