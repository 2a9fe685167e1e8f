"""Two DDP ranks train with Lightning, accumulating two batches; each writes digests of its draws and its recipe's state."""

import json
import os
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch

from tests.integrations.lightning_module import module_of, trainer_of
from tests.integrations.problem import SPECS, digest

warnings.filterwarnings("ignore")


def fit(name, rank, **settings):
    resume = settings.pop("ckpt_path", None)
    module = module_of(pl, name, rank)
    trainer = trainer_of(pl, strategy="ddp", devices=2, accumulate_grad_batches=2, use_distributed_sampler=False, **settings)
    trainer.fit(module, ckpt_path=resume, weights_only=True)
    return module, trainer


def main(out: Path) -> None:
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    result = {}
    for name in SPECS:
        _, half = fit(name, rank, max_epochs=1)
        half.save_checkpoint(out / f"{name}.ckpt")
        whole, trainer = fit(name, rank, max_epochs=2)
        resumed, _ = fit(name, rank, max_epochs=2, ckpt_path=str(out / f"{name}.ckpt"))
        result[name] = {
            "rank": trainer.global_rank,
            "steps": whole.recipe.sampler.step,
            "draws": [digest({"u": draw.u}) for draw in whole.draws],
            "state": digest(whole.recipe.state_dict()),
            "network": digest(whole.network.state_dict()),
            "resumed": digest(resumed.recipe.state_dict()),
        }
    part = out / f"part{rank}"
    part.write_text(json.dumps(result))
    os.replace(part, out / f"rank{rank}.json")
    trainer.strategy.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
