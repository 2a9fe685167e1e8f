"""diffusers' unconditional training script with an adaptive timestep sampler. Lines marked "# adaptive" are all that differs.

Run it:    python examples/diffusers_unconditional.py
Resume it: python examples/diffusers_unconditional.py --resume_from_checkpoint out/unconditional --num_epochs 12
"""

import argparse

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from diffusers import DDPMScheduler, UNet2DModel
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import noisewise
from noisewise import Monitor
from noisewise.integrations.diffusers import read_scheduler


def discs(n: int, size: int = 16) -> torch.Tensor:
    """Coloured discs on black, in [-1, 1]; put your own images here."""
    at = torch.rand(n, 2, 1, 1) * size
    y, x = torch.arange(size)[:, None], torch.arange(size)
    inside = (y - at[:, :1]) ** 2 + (x - at[:, 1:]) ** 2 < 16
    return inside * torch.rand(n, 3, 1, 1) * 2 - 1


def main(args: argparse.Namespace) -> None:
    set_seed(0)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    attention = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    model = UNet2DModel(16, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, **attention)  # yours here
    noise_scheduler = DDPMScheduler(1000, beta_schedule="squaredcos_cap_v2", prediction_type=args.prediction_type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataloader = DataLoader(TensorDataset(discs(256)), batch_size=16, shuffle=True, drop_last=True)
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)
    recipe = noisewise.recipe("adaptive", read_scheduler(noise_scheduler), warmup=20, every=10).attach(optimizer)  # adaptive
    accelerator.register_for_checkpointing(recipe)  # adaptive: part of save_state and load_state
    monitor, first_epoch = Monitor(bins=5), 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        first_epoch = recipe.sampler.step // len(dataloader)

    for epoch in range(first_epoch, args.num_epochs):
        dataloader.set_epoch(epoch)
        for (clean_images,) in dataloader:
            with accelerator.accumulate(model):
                noise = torch.randn_like(clean_images)
                draw = recipe.sample(clean_images)  # adaptive
                timesteps = draw.time  # adaptive: was torch.randint(0, num_train_timesteps, ...)
                noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
                model_output = model(noisy_images, timesteps).sample
                target = recipe.objective.target(clean_images, noise, draw.u)  # noise, images or velocity, by prediction_type
                losses = F.mse_loss(model_output.float(), target, reduction="none").flatten(1).mean(1)  # adaptive
                loss = recipe.loss(draw, losses)  # adaptive
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            monitor.update(draw, losses)
        accelerator.save_state(args.output_dir)

    drawn = recipe.sampler.density(torch.linspace(0.1, 0.9, 5, device=accelerator.device))
    for i, (loss, density) in enumerate(zip(monitor.running.mean(), drawn, strict=True)):
        accelerator.print(f"timesteps from {200 * i}: loss {loss:.3f}, drawn {density:.2f} times as often as uniform")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_epochs", type=int, default=8)
    parser.add_argument("--prediction_type", default="epsilon", choices=["epsilon", "sample", "v_prediction"])
    parser.add_argument("--output_dir", default="out/unconditional")
    parser.add_argument("--resume_from_checkpoint")
    main(parser.parse_args())
