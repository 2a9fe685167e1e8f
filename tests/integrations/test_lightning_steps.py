"""Lightning: which batches a step of the sampler is made of, and which optimizer's step it is."""

import importlib
from contextlib import contextmanager

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.lightning_module import module_of, trainer_of
from tests.integrations.problem import BATCH, BATCHES, assert_same_run, data, losses_of, plain

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers and loggers


@pytest.mark.parametrize("skipped", [0, 1, 3])
@pytest.mark.parametrize("handed_over", [True, False])
@pytest.mark.parametrize("name", ["adaptive", "reinforce"])
def test_a_skipped_batch_leaves_those_that_were_accumulated(lightning, name, skipped, handed_over):
    module = module_of(lightning, name)
    honest, seen, learn = module.training_step, [], module.timesteps.sampler.feedback
    module.timesteps.sampler.feedback = lambda draw, *rest: seen.append(len(draw.u)) or learn(draw, *rest)

    def training_step(batch, batch_idx):
        if batch_idx % 4 != skipped:
            return honest(batch, batch_idx)
        batch = [batch[0][:3]]  # a probe of it would have too few rows
        if handed_over:
            honest(batch, batch_idx)
        else:
            module.timesteps.sample(batch[0])
        module.timesteps.drop()
        return None

    module.training_step = training_step
    trainer_of(lightning, max_epochs=1, accumulate_grad_batches=4).fit(module)
    assert seen == [3 * BATCH] * (BATCHES // 4)


def test_a_batch_that_is_dropped_in_validation_leaves_training_alone(lightning):
    module = module_of(lightning, "adaptive")
    seen, learn = [], module.timesteps.sampler.feedback
    module.timesteps.sampler.feedback = lambda draw, *rest: seen.append(len(draw.u)) or learn(draw, *rest)
    module.val_dataloader = module.train_dataloader

    def validation_step(batch, batch_idx):
        module.timesteps.sample(batch[0])
        module.timesteps.drop()

    module.validation_step = validation_step
    settings = {"accumulate_grad_batches": 4, "val_check_interval": 2, "num_sanity_val_steps": 0}
    trainer_of(lightning, max_epochs=1, **settings).fit(module)
    assert seen == [4 * BATCH] * (BATCHES // 4)


def test_a_callback_may_hand_the_hooks_on(lightning):
    """As in a bundle of callbacks: the trainer does not know the one inside."""
    module = module_of(lightning, "adaptive")
    inner = module.timesteps

    class Bundle(lightning.Callback):
        def setup(self, *given, **named):
            inner.setup(*given, **named)

        def on_train_start(self, *given):
            inner.on_train_start(*given)

        def on_before_optimizer_step(self, *given):
            inner.on_before_optimizer_step(*given)

        def on_train_batch_end(self, *given):
            inner.on_train_batch_end(*given)

    module.configure_callbacks = lambda: [Bundle()]
    trainer_of(lightning).fit(module)
    assert_same_run(inner.sampler, module.draws, module.network, plain("adaptive"))


@pytest.mark.parametrize("when", ["before", "between"])
def test_steps_of_another_model_do_not_end_an_accumulation(lightning, when):
    """A discriminator that steps with every batch, while the network steps with every second one."""
    module = module_of(lightning, "reinforce")
    module.automatic_optimization = False
    other, changed, seen = torch.nn.Parameter(torch.zeros(1)), [], []
    own, learn = module.configure_optimizers(), module.timesteps.sampler.feedback
    module.configure_optimizers = lambda: [own, torch.optim.SGD([other], lr=1.0)]

    @contextmanager
    def feedback(draw, *rest):
        seen.append(len(draw.u))
        before = module.network[0].weight.detach().clone()
        with learn(draw, *rest):
            yield
        changed.append(not torch.equal(before, module.network[0].weight))

    module.timesteps.sampler.feedback = feedback

    def train_other():
        module.manual_backward(other.sum())
        module.optimizers()[1].step()

    def training_step(batch, batch_idx):
        if when == "before":
            train_other()
        draw = module.timesteps.sample(batch[0])

        def loss_at(rows, u):
            return losses_of(module.network, batch[0][rows], u)

        module.manual_backward(module.timesteps.loss(draw, loss_at(slice(None), draw.u), loss_at) / 2)
        if when == "between":
            train_other()
        if batch_idx % 2:
            module.optimizers()[0].step()
            module.optimizers()[0].zero_grad()

    module.training_step = training_step
    trainer_of(lightning, max_epochs=1).fit(module)
    assert float(other) < 0
    assert seen == [2 * BATCH] * (BATCHES // 2)
    assert all(changed), "the sampler's block is around a step of the network"


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_a_search_for_the_batch_size_leaves_no_trace(pl, mode):
    module = module_of(pl, "adaptive")
    module.batch_size, honest = 2, module.training_step
    module.train_dataloader = lambda: DataLoader(TensorDataset(data()), batch_size=module.batch_size)

    def training_step(batch, batch_idx):
        if len(batch[0]) >= 16:
            module.timesteps.sample(batch[0])
            raise RuntimeError("CUDA error: out of memory.")
        return honest(batch, batch_idx)

    module.training_step = training_step
    trainer = trainer_of(pl, max_epochs=1)
    tuner = importlib.import_module(f"{pl.__name__}.tuner").Tuner(trainer)
    found = tuner.scale_batch_size(module, mode=mode, init_val=2, max_trials=6)
    assert 8 <= found < 16
    assert (module.timesteps.sampler.step, module.timesteps.sampler.micro) == (0, 0)


def test_a_search_for_the_learning_rate_leaves_no_trace(pl):
    module = module_of(pl, "adaptive")
    module.lr, seen, learn = 1e-3, [], module.timesteps.sampler.feedback
    module.configure_optimizers = lambda: torch.optim.Adam(module.network.parameters(), lr=module.lr)
    module.timesteps.sampler.feedback = lambda draw, *rest: seen.append(len(draw.u)) or learn(draw, *rest)
    module.val_dataloader = module.train_dataloader
    module.validation_step = lambda batch, batch_idx: None
    finder = importlib.import_module(f"{pl.__name__}.callbacks").LearningRateFinder(num_training_steps=6)
    trainer_of(pl, max_epochs=1, callbacks=[finder]).fit(module)
    assert seen == [BATCH] * BATCHES
