"""The common problem as a LightningModule of either package: the three lines, and nothing else of ours."""

from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.problem import BATCH, data, losses_of, network, recipe_of, seed


def module_of(pl, name, rank=0):
    """A module that holds its recipe and keeps the draws."""

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()
            self.recipe = recipe_of(name)
            self.draws = []

        def train_dataloader(self):
            return DataLoader(TensorDataset(data(rank)), batch_size=BATCH)

        def configure_optimizers(self):
            optimizer = Adam(self.network.parameters(), lr=1e-2)
            self.recipe.attach(optimizer, self.network)
            return optimizer

        def training_step(self, batch, batch_idx):
            (x0,) = batch
            seed(self.current_epoch, batch_idx)

            def loss_at(rows, u):
                return losses_of(self.network, x0[rows], u)

            draw = self.recipe.sample(x0)
            self.draws.append(draw)
            return self.recipe.loss(draw, loss_at(slice(None), draw.u), loss_at)

    return Module()


def trainer_of(pl, **settings):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(**{"accelerator": "cpu", "devices": 1, "max_epochs": 2, **quiet, **settings})
