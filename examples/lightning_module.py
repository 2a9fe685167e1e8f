"""Lightning: the callback draws the noise levels, learns around each optimizer step and goes into the checkpoints.

Run it: python examples/lightning_module.py
With pytorch_lightning instead of lightning only the import differs.
"""

import tempfile
import warnings

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from noisewise import DDPM, AdaptiveSampler, Objective
from noisewise.integrations.lightning import TimestepCallback


class Diffusion(L.LightningModule):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))
        self.objective = Objective(DDPM.linear(), "eps")
        self.timesteps = TimestepCallback(AdaptiveSampler(self.objective, warmup=50, every=10))

    def configure_callbacks(self) -> list:
        return [self.timesteps]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.network.parameters(), lr=2e-3)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        phase = time[:, None] / 1000 * torch.pi / 2
        return self.network(torch.cat([x, phase.sin(), phase.cos()], 1))

    def training_step(self, x0: Tensor, batch_idx: int) -> Tensor:
        def loss_at(rows: Tensor | slice, u: Tensor) -> Tensor:  # one loss a sample, at noise levels u
            return self.objective.losses(self, x0[rows], u)

        draw = self.timesteps.sample(x0)
        return self.timesteps.loss(draw, loss_at(slice(None), draw.u), loss_at)

    def on_train_epoch_end(self) -> None:
        sampler = self.timesteps.sampler
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
