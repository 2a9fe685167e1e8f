"""Trainers of ours in the shape of other projects' trainers, with the lines that docs/trainers/ adds to those."""

import os
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

import noisewise
from noisewise import DDPM, Objective

TRAINING_STATE_DIR = "training_state"


class Shape:
    """A run of optimizer steps on data and noise that depend on the step alone."""

    recipe: noisewise.Recipe

    def steps(self, first, last):
        for step in range(first, last):
            torch.manual_seed(step)
            self.step(torch.randn(4, 2, 4, 4) * torch.tensor([1.0, 0.2])[:, None, None])
        return self


def small_network():
    torch.manual_seed(0)
    network = nn.Conv2d(2, 2, 3, padding=1)
    return network, torch.optim.AdamW(network.parameters(), lr=1e-2)


class Kohya(Shape):
    """Levels in a library function, losses in a method; weights for samples; validation at a fixed level; Accelerate."""

    def __init__(self, folder=None):
        args = self.args = SimpleNamespace(v_parameterization=True)
        AcceleratorState._reset_state(True)
        self.accelerator = accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        self.network, self.optimizer = self.accelerator.prepare(*small_network())
        self.noise_scheduler, optimizer = self.get_noise_scheduler(args, accelerator.device), self.optimizer
        process = DDPM.from_diffusers(self.get_noise_scheduler(args, accelerator.device))
        objective = Objective(process, "v" if args.v_parameterization else "eps")
        self.recipe = noisewise.recipe("adaptive", objective).attach(optimizer)
        accelerator.register_for_checkpointing(self.recipe)
        if folder is not None:
            accelerator.load_state(folder)

    def get_noise_scheduler(self, args, device):
        from diffusers import DDPMScheduler

        return DDPMScheduler(beta_schedule="scaled_linear", prediction_type="v_prediction")

    def levels(self, latents, recipe=None):
        timesteps = torch.full((len(latents),), 500)
        if recipe is not None:
            timesteps = recipe.sample(latents).time
        return timesteps

    def process_batch(self, latents, is_train):
        noise = torch.randn_like(latents)
        timesteps = self.levels(
            latents,
            self.recipe if is_train else None,
        )
        with torch.set_grad_enabled(is_train):
            noise_pred = self.network(self.noise_scheduler.add_noise(latents, noise, timesteps))
        target = self.noise_scheduler.get_velocity(latents, noise, timesteps)
        loss = ((noise_pred - target) ** 2).mean([1, 2, 3])
        if is_train:
            loss = self.recipe.weigh(self.recipe.last, loss)
        loss_weights = torch.tensor([1.0, 1.0, 1.0, 0.5])
        return (loss * loss_weights).mean()

    def step(self, latents):
        for micro in range(2):
            with self.accelerator.accumulate(self.network):
                self.accelerator.backward(self.process_batch(latents + micro, is_train=True))
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        self.process_batch(latents, is_train=False)

    def save(self, folder):
        self.accelerator.save_state(folder)


class TorchCFM(Shape):
    """Data at t = 1, and a library that pairs noise and data."""

    def __init__(self, folder=None):
        self.network, self.optim = small_network()
        optim = self.optim
        recipe = noisewise.recipe("adaptive", noisewise.Flow(data_at=1)).attach(optim)
        self.recipe = recipe
        if folder is not None:
            saved = torch.load(os.path.join(folder, "run.pt"), weights_only=True)
            self.network.load_state_dict(saved["model"])
            self.optim.load_state_dict(saved["optim"])
            recipe.load_state_dict(saved["recipe"])

    def sample_location_and_conditional_flow(self, x0, x1, t):
        x0 = x0[torch.randperm(len(x0))]
        return t, (1 - t[:, None, None, None]) * x0 + t[:, None, None, None] * x1, x1 - x0

    def step(self, x1):
        x0, recipe, FM = torch.randn_like(x1), self.recipe, self
        self.optim.zero_grad()
        draw = recipe.sample(x1)
        t, xt, ut = FM.sample_location_and_conditional_flow(x0, x1, t=draw.time)
        assert t is draw.time
        vt = self.network(xt)
        losses = ((vt - ut) ** 2).flatten(1).mean(1)
        loss = recipe.loss(draw, losses)
        loss.backward()
        self.optim.step()

    def save(self, folder):
        recipe = self.recipe
        state = {
            "model": self.network.state_dict(),
            "optim": self.optim.state_dict(),
            "recipe": recipe.state_dict(),
        }
        torch.save(state, os.path.join(folder, "run.pt"))


class Flow(nn.Module):
    """A policy's own model: draws times, returns losses of elements."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Linear(4, 4)

    def sample_time(self, bsize, device):
        return torch.rand(bsize, device=device)

    def forward(self, actions):
        noise = torch.randn_like(actions)
        time = self.sample_time(actions.shape[0], actions.device)[:, None, None]
        return (self.network(time * noise + (1 - time) * actions) - (noise - actions)) ** 2


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Flow()

    def forward(self, batch, reduction="mean"):
        losses = self.model(batch["action"]) * ~batch["action_is_pad"][..., None]
        steps = (~batch["action_is_pad"]).sum(1)
        losses = losses.sum([1, 2]) / (4 * steps.clamp(min=1))
        return (losses if reduction == "none" else (losses * steps).sum() / steps.sum()), {}


class LeRobot(Shape):
    """A policy that draws times itself, and a masked loss normalised over the batch."""

    def __init__(self, folder=None, wrap=lambda policy: policy):
        policy = wrap(Policy())
        accelerator = self.accelerator = Accelerator(cpu=True)
        policy, optimizer = accelerator.prepare(policy, torch.optim.AdamW(policy.parameters(), lr=1e-2))
        recipe = noisewise.recipe("adaptive", noisewise.Flow()).attach(optimizer)
        flow = next(part for part in policy.modules() if hasattr(part, "sample_time"))
        flow.sample_time = lambda bsize, device: recipe.sample(torch.empty(bsize, device=device)).time
        self.network, self.optimizer, self.recipe = policy, optimizer, recipe
        if folder is not None:
            cfg = SimpleNamespace(checkpoint_path=folder)
            saved = torch.load(folder / TRAINING_STATE_DIR / "policy.pt", weights_only=True)
            policy.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            recipe.load_state_dict(torch.load(cfg.checkpoint_path / TRAINING_STATE_DIR / "recipe.pt"))

    def loss_of(self, policy, batch, recipe=None):
        if policy is None:
            return None
        elif recipe is not None:  # noqa: RET505 - as on the page
            losses, output_dict = policy(batch, reduction="none")
            valid = (~batch["action_is_pad"]).sum(1).float()
            loss = (recipe.weigh(recipe.last, losses) * valid).sum() / valid.sum().clamp(min=1)
        else:
            loss, output_dict = policy(batch)
        assert output_dict == {}
        return loss

    def step(self, x0):
        batch = {"action": x0.flatten(1, 2), "action_is_pad": torch.arange(8) >= torch.tensor([3, 8, 5, 8])[:, None]}
        self.accelerator.backward(self.loss_of(self.network, batch, recipe=self.recipe))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, checkpoint_dir):
        recipe = self.recipe
        (checkpoint_dir / TRAINING_STATE_DIR).mkdir()
        state = {"model": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, checkpoint_dir / TRAINING_STATE_DIR / "policy.pt")
        torch.save(recipe.state_dict(), checkpoint_dir / TRAINING_STATE_DIR / "recipe.pt")


class Setup:
    """Noise and losses of a model, in methods that know little of each other."""

    def _get_timestep_discrete(self, deterministic, batch_size):
        if deterministic:
            return torch.full((batch_size,), 499)
        elif getattr(self, "recipe", None) is not None:  # noqa: RET505 - as on the page
            return self.recipe.last.time.int()
        return torch.randint(0, 1000, (batch_size,))

    def predict(self, network, betas, latents, deterministic=False):
        generator = torch.Generator().manual_seed(1)
        timestep = self._get_timestep_discrete(deterministic, len(latents))
        noise = torch.randn(latents.shape, generator=generator)
        signal = torch.cumprod(1 - betas, 0)[timestep][:, None, None, None]
        return timestep, network(signal.sqrt() * latents + (1 - signal).sqrt() * noise), noise

    def losses(self, predicted, target, mask, prior):
        errors = (predicted - target) ** 2 * mask + 0.5 * (predicted - prior) ** 2 * ~mask
        losses = errors.mean([1, 2, 3])
        if torch.is_grad_enabled():
            losses = self.recipe.weigh(self.recipe.last, losses)
        return losses


class OneTrainer(Shape):
    """Two predictions of one batch at the same levels, masked with prior preservation; validation without gradients."""

    def __init__(self, folder=None):
        self.network, optimizer = small_network()
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
        self.model = SimpleNamespace(noise_scheduler=SimpleNamespace(betas=betas), optimizer=optimizer)
        self.model_setup, self.config = Setup(), SimpleNamespace(get_last_backup_path=lambda: folder)
        process = noisewise.DDPM(self.model.noise_scheduler.betas)
        recipe = noisewise.recipe("adaptive", noisewise.Objective(process)).attach(self.model.optimizer)
        self.model_setup.recipe = recipe
        self.recipe = recipe
        if folder is not None:
            saved = torch.load(os.path.join(folder, "model.pt"), weights_only=True)
            self.network.load_state_dict(saved["model"])
            self.model.optimizer.load_state_dict(saved["optimizer"])
        if self.config.get_last_backup_path() is not None:
            recipe.load_state_dict(torch.load(os.path.join(self.config.get_last_backup_path(), "recipe.pt")))

    def step(self, latents):
        batch, recipe, setup = {"latent_image": latents, "mask": torch.rand(4, 1, 4, 4) > 0.5}, self.recipe, self.model_setup
        recipe.sample(batch["latent_image"])
        with torch.no_grad():
            before, prior, _ = setup.predict(self.network, self.model.noise_scheduler.betas, latents)
        timestep, predicted, target = setup.predict(self.network, self.model.noise_scheduler.betas, latents)
        assert torch.equal(before, timestep)
        setup.losses(predicted, target, batch["mask"], prior).mean().backward()
        self.model.optimizer.step()
        self.model.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            _, predicted, target = setup.predict(
                self.network, self.model.noise_scheduler.betas, latents[:1], deterministic=True
            )
            setup.losses(predicted, target, batch["mask"][:1], predicted)

    def save(self, backup_path):
        state = {"model": self.network.state_dict(), "optimizer": self.model.optimizer.state_dict()}
        torch.save(state, os.path.join(backup_path, "model.pt"))
        torch.save(self.model_setup.recipe.state_dict(), os.path.join(backup_path, "recipe.pt"))


class Base:
    """A trainer with places for extensions, as musubi-tuner has them."""

    def _register_hooks_and_resume(self, args, accelerator, network):
        if args.resume is not None:
            accelerator.load_state(args.resume)

    def on_train_start(self, args, accelerator, network, transformer, optimizer):
        pass

    def process_batch(self, args, network, latents):
        noise = torch.randn_like(latents)
        x, timesteps = self.get_noisy_model_input_and_timesteps(args, noise, latents, None, None)
        level = ((timesteps - 1) / 1000)[:, None, None, None]
        torch.testing.assert_close(x, (1 - level) * latents + level * noise)
        output = SimpleNamespace(pred=network(x), target=noise - latents)
        return self.compute_loss(args, output, timesteps, None, torch.float32, torch.float32, 0)[0]


def musubi(mixin):
    """A trainer with the page's class in front."""

    class Musubi(Shape, mixin, Base):
        def __init__(self, folder=None):
            args = self.args = SimpleNamespace(resume=folder)
            AcceleratorState._reset_state(True)
            self.accelerator = Accelerator(cpu=True)
            self.network, self.optimizer = self.accelerator.prepare(*small_network())
            self._register_hooks_and_resume(args, self.accelerator, self.network)
            self.on_train_start(args, self.accelerator, self.network, self.network, self.optimizer)

        def step(self, latents):
            self.accelerator.backward(self.process_batch(self.args, self.network, latents))
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

        def save(self, folder):
            self.accelerator.save_state(folder)

    return Musubi


class Preconditioned(nn.Module):
    """D(x, sigma) with an uncertainty, as EDM2's networks have it."""

    def __init__(self):
        super().__init__()
        self.network, _ = small_network()
        self.logvar = nn.Parameter(torch.zeros(1))

    def forward(self, x, sigma, labels=None, return_logvar=False):
        scale = (1 + sigma**2) ** -0.5
        return scale**2 * x + sigma * scale * self.network(scale * x), self.logvar + 0.1 * sigma.log()


def edm2(loss):
    """A loop in which the loss is named by a string, and summed over elements."""

    class EDM2(Shape):
        def __init__(self, folder=None):
            self.network, loss_fn = Preconditioned(), loss()
            optimizer = torch.optim.Adam(self.network.parameters(), lr=1e-2)
            loss_fn.recipe.attach(optimizer)
            self.loss_fn, self.optimizer, self.recipe = loss_fn, optimizer, loss_fn.recipe
            if folder is not None:
                saved = torch.load(os.path.join(folder, "training-state.pt"), weights_only=True)
                for name, part in self.parts().items():
                    part.load_state_dict(saved[name])

        def parts(self):
            return {"net": self.network, "loss_fn": self.loss_fn, "optimizer": self.optimizer}

        def step(self, images):
            self.optimizer.zero_grad(set_to_none=True)
            for half in images.chunk(2):
                self.loss_fn(net=self.network, images=half).sum().mul(1 / len(images)).backward()
            self.optimizer.step()

        def save(self, folder):
            state = {name: part.state_dict() for name, part in self.parts().items()}
            torch.save(state, os.path.join(folder, "training-state.pt"))

    return EDM2
