"""Lightning: the module holds the recipe, which learns from each optimizer step and goes into the checkpoints.

Run it: python examples/lightning_module.py
With pytorch_lightning instead of lightning only the import differs.
"""

import tempfile
import warnings

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import noisewise
from noisewise import DDPM, Objective


class Diffusion(L.LightningModule):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))
        self.objective = Objective(DDPM.linear(), "eps")
        self.recipe = noisewise.recipe("adaptive", self.objective, warmup=50, every=10)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-3)
        self.recipe.attach(optimizer)
        return optimizer

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        phase = time[:, None] / 1000 * torch.pi / 2
        return self.network(torch.cat([x, phase.sin(), phase.cos()], 1))

    def training_step(self, x0: Tensor, batch_idx: int) -> Tensor:
        draw = self.recipe.sample(x0)
        return self.recipe.loss(draw, self.objective.losses(self, x0, draw.u))  # one loss a sample

    def on_train_epoch_end(self) -> None:
        sampler = self.recipe.sampler
        density = [round(float(d), 2) for d in sampler.density((torch.arange(5, device=self.device) + 0.5) / 5)]
        print(f"epoch {self.current_epoch}: {sampler.step} optimizer steps, density in fifths {density}")


def trainer(epochs: int, folder: str) -> L.Trainer:
    return L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        accumulate_grad_batches=2,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="lightning")  # its advice on the number of workers
    L.seed_everything(0, verbose=False)
    angle = torch.rand(8192) * 6.28
    points = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(8192, 2)
    with tempfile.TemporaryDirectory() as folder:
        first = trainer(2, folder)
        first.fit(Diffusion(), DataLoader(points, batch_size=64))
        print("resumed from Lightning's own checkpoint")
        trainer(4, folder).fit(
            Diffusion(),
            DataLoader(points, batch_size=64),
            ckpt_path=first.checkpoint_callback.best_model_path,
            weights_only=True,
        )
