"""diffusers' text-to-image LoRA script with an adaptive sampler and Min-SNR. Lines marked "# adaptive" are all that differs.

Run it:    python examples/diffusers_text_to_image_lora.py
Resume it: python examples/diffusers_text_to_image_lora.py --resume_from_checkpoint out/lora.pt --max_train_steps 300
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModel

import noisewise
from noisewise import Monitor
from noisewise.integrations.diffusers import read_scheduler

TEXT = {"vocab_size": 100, "bos_token_id": 0, "eos_token_id": 1, "hidden_size": 16, "intermediate_size": 32}
BLOCKS = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)  # random tiny models; load yours with AutoencoderKL.from_pretrained(name, subfolder="vae") and so on
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4).requires_grad_(False)
    text_encoder = CLIPTextModel(CLIPTextConfig(**TEXT, num_hidden_layers=1, num_attention_heads=2)).requires_grad_(False)
    unet = UNet2DConditionModel(
        8, block_out_channels=(16, 32), norm_num_groups=4, cross_attention_dim=16, attention_head_dim=4, **BLOCKS
    ).requires_grad_(False)
    unet.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    noise_scheduler = DDPMScheduler(1000, 0.00085, 0.012, "scaled_linear")
    if args.prediction_type is not None:  # the script does so in its loop, too late for a recipe
        noise_scheduler.register_to_config(prediction_type=args.prediction_type)
    recipe = noisewise.recipe(args.sampler, read_scheduler(noise_scheduler))  # adaptive: was snr = compute_snr(...), snr_gamma
    accelerator, monitor = Accelerator(cpu=True, gradient_accumulation_steps=2), Monitor(bins=5)  # yours without cpu=True
    lora = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    unet, optimizer = accelerator.prepare(unet, torch.optim.AdamW(lora, lr=1e-3))
    recipe.attach(optimizer)  # adaptive
    images, captions = torch.rand(64, 3, 8, 8) * 2 - 1, torch.randint(100, (64, 8))  # your images, and tokenizer(text)
    if args.resume_from_checkpoint:
        saved = torch.load(args.resume_from_checkpoint, weights_only=True)
        set_peft_model_state_dict(unet, saved["lora"])
        optimizer.load_state_dict(saved["optimizer"])
        recipe.load_state_dict(saved["recipe"])  # adaptive
        torch.set_rng_state(saved["random_state"])

    while recipe.sampler.step < args.max_train_steps:
        rows = torch.randint(len(images), (16,))
        with accelerator.accumulate(unet):
            latents = vae.encode(images[rows]).latent_dist.sample() * vae.config.scaling_factor
            noise, encoder_hidden_states = torch.randn_like(latents), text_encoder(captions[rows])[0]
            draw = recipe.sample(latents)  # adaptive
            timesteps = draw.time  # adaptive: was torch.randint(0, num_train_timesteps, ...)
            noisy_latents = noise_scheduler.add_noise(latents, noise, timesteps)
            model_pred = unet(noisy_latents, timesteps, encoder_hidden_states, return_dict=False)[0]
            target = recipe.objective.target(latents, noise, draw.u)  # noise or get_velocity(...), by prediction_type
            losses = F.mse_loss(model_pred.float(), target.float(), reduction="none").flatten(1).mean(1)
            loss = recipe.loss(draw, losses)  # adaptive
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            monitor.update(draw, losses)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    state = {"lora": get_peft_model_state_dict(unet), "optimizer": optimizer.state_dict()}
    torch.save({**state, "recipe": recipe.state_dict(), "random_state": torch.get_rng_state()}, args.output)
    drawn = recipe.sampler.density(torch.linspace(0.1, 0.9, 5))
    for i, (loss, density) in enumerate(zip(monitor.running.mean(), drawn, strict=True)):
        print(f"timesteps from {200 * i}: loss {loss:.3f}, drawn {density:.2f} times as often as uniform")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_train_steps", type=int, default=150)
    parser.add_argument("--prediction_type", choices=["epsilon", "v_prediction"], help="that of the scheduler by default")
    parser.add_argument("--sampler", default="adaptive:warmup=20,every=10+minsnr:gamma=5", help="adaptive+minsnr for long runs")
    parser.add_argument("--output", default="out/lora.pt")
    parser.add_argument("--resume_from_checkpoint")
    main(parser.parse_args())
