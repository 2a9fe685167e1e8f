"""diffusers' SD3 (and Flux) training loop with an adaptive sampler. Lines marked "# adaptive" are all that differs.

Flow scripts draw u with u = 0 the *most* noise and look it up in noise_scheduler.timesteps, which runs down. Here u = 0 is the
least noise; draw.time is the timestep itself, so nothing needs to be looked up or turned round.

Run it: python examples/diffusers_sd3.py
"""

import argparse

import torch
from accelerate import Accelerator
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel

import noisewise
from noisewise import Monitor
from noisewise.integrations.diffusers import read_scheduler


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    transformer = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=16,
    )  # or SD3Transformer2DModel.from_pretrained(name, subfolder="transformer")  # fmt: skip
    noise_scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)  # or .from_pretrained(name, subfolder="scheduler")
    # adaptive (a scheduler with dynamic shifting, as Flux's, needs shift= or mu=)
    recipe = noisewise.recipe(args.weighting_scheme, read_scheduler(noise_scheduler))
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=2e-3)
    transformer, optimizer = accelerator.prepare(transformer, optimizer)
    recipe.attach(optimizer)  # adaptive
    smooth = torch.nn.functional.interpolate(torch.randn(64, 4, 3, 3), size=8, mode="bicubic")
    data = smooth, torch.randn(64, 5, 32), torch.randn(64, 16)  # your latents and embeddings
    latents, prompt_embeds, pooled_prompt_embeds = (tensor.to(accelerator.device) for tensor in data)
    monitor = Monitor(bins=5)

    while recipe.sampler.step < args.max_train_steps:
        rows = torch.randint(len(latents), (16,))
        with accelerator.accumulate(transformer):
            model_input = latents[rows]
            noise = torch.randn_like(model_input)
            draw = recipe.sample(model_input)  # adaptive: was compute_density_for_timestep_sampling(...)
            timesteps, sigmas = draw.time, draw.sigma  # adaptive: was noise_scheduler.timesteps[indices], get_sigmas(timesteps)
            noisy_model_input = (1.0 - sigmas) * model_input + sigmas * noise
            model_pred = transformer(
                hidden_states=noisy_model_input,
                timestep=timesteps,
                encoder_hidden_states=prompt_embeds[rows],
                pooled_projections=pooled_prompt_embeds[rows],
                return_dict=False,
            )[0]
            target = noise - model_input
            losses = ((model_pred.float() - target.float()) ** 2).flatten(1).mean(1)  # adaptive: one a sample, not weighted
            loss = recipe.loss(draw, losses)  # adaptive
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(transformer.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            monitor.update(draw, losses)

    u = torch.linspace(0.1, 0.9, 5, device=accelerator.device)
    rows_of_report = zip(recipe.sampler.process.scales(u)[1], monitor.running.mean(), recipe.sampler.density(u), strict=True)
    for sigma, loss, drawn in rows_of_report:
        print(f"around sigma {sigma:.2f}: loss {loss:.3f}, drawn {drawn:.2f} times as often as uniform")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_train_steps", type=int, default=200)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--weighting_scheme", default="adaptive:warmup=20,every=10", help="adaptive alone for long runs")
    main(parser.parse_args())
