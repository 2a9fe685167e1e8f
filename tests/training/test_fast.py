"""The pieces of the fast path, without a GPU: fixed buffers, numbers in tensors, and when it is taken."""

import copy
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from noisewise.models.unet import UNet
from noisewise.training.config import EMAConfig, ModelConfig, OptimizerConfig
from noisewise.training.ema import EMA
from noisewise.training.fast import GraphedStep, blocks, choose, why_not
from noisewise.training.fast.fuse import fuse, unfuse
from noisewise.training.fast.graphs import any_kernels, host_chance_is_an_error, recover_allocator, repeatable_kernels
from noisewise.training.optimizer import make_optimizer, set_learning_rate
from noisewise.training.parallel import make_accelerator
from noisewise.training.run import train
from noisewise.training.trainer import Trainer
from tests.training.test_run import final
from tests.training.tiny import DIT, Own, advance, differing, own, saved, tensors, tiny, trainer_of


@pytest.fixture
def fixed_buffers(monkeypatch):
    """Trainers take the fast path, but for the compiler and the recording."""
    monkeypatch.setattr(choose, "why_not", lambda *_: None)
    monkeypatch.setattr(choose, "fuse", lambda _: 0)
    monkeypatch.setattr(GraphedStep, "capture", partial_method(GraphedStep.capture, record=False))


def partial_method(function, **settings):
    return lambda self, *arguments: partial(function, self, *arguments, **settings)()


CASES = {
    "plain": {},
    "adaptive": {"sampler": "adaptive:warmup=2,every=2+minsnr"},
    "policy gradient": {"sampler": "paper_cifar10:every=3"},
    "lookahead": {"sampler": "adaptive:estimator=lookahead,strata=4,budget=0.5,warmup=2"},
    "gradient variance": {"sampler": "gradient_variance:strata=3,every=2"},
    "learned weighting": {"sampler": "uniform+learned"},
    "accumulated": {"accumulation": 4, "sampler": "speed:k=5"},
    "rising decay": {"ema": EMAConfig(decay=0.99, ramp=True)},
    "power average": {"ema": EMAConfig(kind="power")},
    "classes": {"model": ModelConfig(name="dit", options=DIT, conditional=True)},
    "dropout": {"model": own("Own", dropout=0.3)},
    "running statistics": {"model": own("Normed")},
    "bad steps": {"model": own("Poisoned", low=300, high=320), "steps": 30},
}


@pytest.mark.parametrize("case", CASES)
def test_fixed_buffers_change_nothing(case, request):
    exact = OptimizerConfig(lr=2.0**-7, warmup=4)  # learning rates that float32 holds
    config = tiny(**{"model": own("Own"), "optimizer": exact, **CASES[case]})
    plain = trainer_of(config)
    rows = advance(plain, config.steps)
    request.getfixturevalue("fixed_buffers")
    fast = trainer_of(config)
    assert isinstance(fast.arithmetic, GraphedStep)
    again = advance(fast, config.steps)
    assert fast.arithmetic.ready
    assert len(rows) == len(again)
    expected, found = tensors(plain), tensors(fast)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        if "qkv.bias" in name:  # a key's bias has no gradient but rounding, which Adam makes large
            continue
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert fast.ema.updates == plain.ema.updates
    if case == "bad steps":
        assert again[-1]["skipped"] == rows[-1]["skipped"] > 0


def test_getting_ready_leaves_no_trace(fixed_buffers):
    made = trainer_of(tiny(sampler="adaptive", ema=EMAConfig(ramp=True)))
    before = tensors(made)
    made.warm_up()
    with made.arithmetic._state_put_back():
        made.arithmetic._gradients()  # as the recording does
        made.arithmetic._update()
        changed = tensors(made)
        assert differing(before, {key: changed[key] for key in before}) != []
    after = tensors(made)
    assert differing(before, {key: after[key] for key in before}) == []
    assert all(bool((value == 0).all()) for key, value in after.items() if key not in before)  # Adam's, made by the first step


def test_a_run_goes_on_exactly_from_its_checkpoint(fixed_buffers, tmp_path):
    config = tiny(sampler="adaptive:warmup=2,every=2", ema=EMAConfig(decay=0.9, ramp=True))
    whole = train(replace(config, out=str(tmp_path / "whole")))
    first = trainer_of(config)
    advance(first, 5)
    second = trainer_of(config)
    second.load(saved(first, tmp_path / "half"))
    advance(second, 12)
    assert differing(final(whole), {name: value for name, value in tensors(second).items() if name in final(whole)}) == []


def test_loading_after_recording_records_anew(fixed_buffers, tmp_path):
    config = tiny()
    other = trainer_of(config)
    advance(other, 7)
    point = saved(other, tmp_path)
    made = trainer_of(config)
    advance(made, 3)
    made.load(point)
    assert not made.arithmetic.ready  # the graphs would go on with the old optimizer state
    advance(made, 12)
    advance(other, 12)
    assert differing(tensors(made), tensors(other)) == []


def test_the_average_moves_alike_by_a_number_and_by_a_tensor():
    torch.manual_seed(0)
    models = [nn.Linear(5, 7) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    averages = [EMA(model, EMAConfig(decay=0.9)) for model in models]
    for model in models:
        with torch.no_grad():
            model.weight += 1
    averages[0].blend(0.25)
    averages[1].blend(torch.tensor(0.25))
    for name, value in averages[0].average.items():
        torch.testing.assert_close(averages[1].average[name], value, rtol=1e-6, atol=1e-7)
    assert float((averages[0].average["weight"] - models[0].weight).detach().mean()) == pytest.approx(-0.75)


def test_a_learning_rate_in_a_tensor_is_the_same_learning_rate():
    torch.manual_seed(0)
    start = torch.randn(4, 3)
    weights = [nn.Parameter(start.clone()) for _ in range(2)]
    settings = OptimizerConfig(lr=1e-3)
    optimizers = [
        make_optimizer([w], settings, torch.device("cpu"), graphed=g) for w, g in zip(weights, (False, True), strict=True)
    ]
    assert isinstance(optimizers[1].param_groups[0]["lr"], torch.Tensor)
    held = optimizers[1].param_groups[0]["lr"]
    for k in range(3):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            set_learning_rate(optimizer, 1e-3 / (k + 1))
            weight.grad = (weight.detach() * 2).clone()
            optimizer.step()
    assert optimizers[1].param_groups[0]["lr"] is held
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=1e-7)


def test_it_is_not_taken_on_a_cpu_and_says_so_only_when_asked_for():
    config, told = tiny(), []
    assert "needs a CUDA device" in why_not(config, make_accelerator(config), nn.Linear(1, 1))
    made = Trainer(config, training_parts(config), make_accelerator(config), told.append)
    assert type(made.arithmetic).__name__ == "Step"
    assert told == []
    with pytest.raises(ValueError, match="fast=always, but the fast path cannot be taken: it needs a CUDA device"):
        trainer_of(tiny(fast="always"))


def test_a_step_that_cannot_be_recorded_is_made_all_the_same_and_the_reason_is_told(monkeypatch):
    def failing(self, *arguments):
        raise RuntimeError("waits for the device\nand more")

    monkeypatch.setattr(choose, "why_not", lambda *_: None)
    monkeypatch.setattr(GraphedStep, "capture", failing)
    config, told = tiny(), []
    made = Trainer(config, training_parts(config), make_accelerator(config), told.append)
    rows = advance(made, 12)
    assert told[-1] == "the plain path, not the fast one: the step cannot be recorded (waits for the device)"
    monkeypatch.undo()
    plain = trainer_of(config)
    for mine, theirs in zip(rows, advance(plain, 12), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    monkeypatch.setattr(choose, "why_not", lambda *_: None)
    monkeypatch.setattr(GraphedStep, "capture", failing)
    strict = Trainer(tiny(fast="always"), training_parts(config), make_accelerator(config))
    with pytest.raises(RuntimeError, match="waits for the device"):
        strict.warm_up()


def test_after_a_recording_that_failed_half_way_all_goes_on_as_on_the_plain_path(monkeypatch):
    """The average above all, whose weight had moved into a tensor that nobody fills any more."""
    config = tiny(model=own("Normed"), ema=EMAConfig(decay=0.99, ramp=True), optimizer=OptimizerConfig(lr=2.0**-7, warmup=4))
    plain = trainer_of(config)
    advance(plain, 12)

    def failing(self):
        self._gradients()
        self._update()
        raise RuntimeError("no recording")

    monkeypatch.setattr(choose, "why_not", lambda *_: None)
    monkeypatch.setattr(GraphedStep, "_compiled", lambda self: self.call)
    monkeypatch.setattr(GraphedStep, "_recorded", failing)
    fallen = trainer_of(config)
    advance(fallen, 12)
    assert not fallen.arithmetic.ready
    expected, found = tensors(plain), tensors(fallen)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def training_parts(config):
    from noisewise.training.components import build_parts

    return build_parts(config)


def test_hooks_and_fp16_and_processes_stand_in_the_way(monkeypatch):
    class Device:
        type = "cuda"

    class Accelerated:
        device, scaler = Device(), None

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    model = nn.Sequential(nn.Linear(1, 1))
    assert why_not(tiny(), Accelerated(), model) is None
    assert "fast=never" in why_not(tiny(fast="never"), Accelerated(), model)
    assert "several processes" in why_not(tiny(parallel="fsdp"), Accelerated(), model)
    Accelerated.scaler = object()
    assert "fp16" in why_not(tiny(), Accelerated(), model)
    Accelerated.scaler = None
    model[0].register_forward_hook(lambda *_: None)
    assert why_not(tiny(), Accelerated(), model) == "the model has hooks (on 0), which a graph would not call"


@pytest.mark.parametrize("classes", [0, 5])
def test_a_fused_unet_is_the_plain_one_again_when_that_is_taken_back(classes):
    pytest.importorskip("triton")
    torch.manual_seed(0)
    settings = {"channels": 32, "multipliers": (1, 2), "blocks": 1, "attention": (4,), "dropout": 0.0, "zero_init": False}
    model = UNet((3, 8, 8), classes, **settings)
    names = list(model.state_dict())
    x, time = torch.randn(2, 3, 8, 8), torch.tensor([3, 700])
    wanted = torch.autograd.grad(model(x, time).square().mean(), list(model.parameters()))
    expected, plain = model(x, time), [module.forward.__qualname__ for module in model.modules()]
    assert fuse(model) == 8
    torch.testing.assert_close(model(x, time), expected, rtol=1e-4, atol=1e-5)
    found = torch.autograd.grad(model(x, time).square().mean(), list(model.parameters()))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    assert list(model.state_dict()) == names
    assert len(copy.deepcopy(model).state_dict()) == len(names)
    assert [module.forward.__qualname__ for module in model.modules()] != plain
    unfuse(model)
    assert [module.forward.__qualname__ for module in model.modules()] == plain
    torch.testing.assert_close(model(x, time), expected, rtol=1e-4, atol=1e-5)


def test_a_fused_block_drops_where_its_dropout_is_in_training_mode():
    pytest.importorskip("triton")
    model = UNet((3, 8, 8), channels=32, multipliers=(1,), blocks=1, attention=(), dropout=0.5, zero_init=False)
    assert fuse(model) > 0
    x, time = torch.randn(2, 3, 8, 8), torch.tensor([3, 700])
    model.eval()
    assert torch.equal(model(x, time), model(x, time))
    for module in model.modules():
        if isinstance(module, nn.Dropout):  # the rest stays in evaluation mode, as for samples of a posterior
            module.train()
    assert not torch.equal(model(x, time), model(x, time))


# Recording ------------------------------------------------------------------------------------------------------------


CUDA = torch.device("cuda", 1)
POOL = (0, 7)


@pytest.mark.parametrize(
    ("draw", "named"),
    [(random.random, "random"), (np.random.rand, "numpy.random"), (lambda: torch.rand(()), "torch")],
)
def test_chance_on_the_host_is_an_error(draw, named):
    with pytest.raises(RuntimeError, match=rf"random numbers were drawn on the host \({named}\)"), host_chance_is_an_error():
        draw()


def test_generators_of_ones_own_are_none_of_it():
    with host_chance_is_an_error():
        torch.rand((), generator=torch.Generator().manual_seed(0))
        np.random.default_rng(0).random()
        random.Random(0).random()


@pytest.fixture
def allocator(monkeypatch):
    """torch's allocator as far as it is asked; `under_way` holds the pools that recordings go into."""

    class Allocator:
        def __init__(self):
            self.under_way, self.released = [], []

        def end(self, index, pool):
            if (index, pool) not in self.under_way:
                raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
            self.under_way.remove((index, pool))

        def release(self, index, pool):
            self.released.append((index, pool))

    made = Allocator()
    monkeypatch.setattr(torch._C, "_cuda_releasePool", made.release, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end, raising=False)
    return made


def test_the_allocator_is_told_that_the_recording_has_ended_if_torch_has_not(allocator):
    allocator.under_way = [(1, (0, 3)), (1, POOL)]
    recover_allocator(CUDA, POOL)
    assert (allocator.under_way, allocator.released) == ([(1, (0, 3))], [(1, POOL)])


def test_a_recording_that_torch_has_ended_is_not_released_twice(allocator):
    recover_allocator(CUDA, POOL)
    assert allocator.released == []


def test_older_torch_has_another_name_for_it(allocator, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateCurrentStreamToPool", allocator.end, raising=False)
    allocator.under_way = [(1, POOL)]
    recover_allocator(CUDA, POOL)
    assert (allocator.under_way, allocator.released) == ([], [(1, POOL)])


# Orders of adding -----------------------------------------------------------------------------------------------------


class Asking(Own):
    """Takes down whether torch is held to a fixed order of adding."""

    def forward(self, x, time):
        self.held = torch.are_deterministic_algorithms_enabled()
        return super().forward(x, time)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_fixed_order_of_adding_is_kept_unless_it_is_given_up(deterministic, fixed_buffers):
    config = tiny(deterministic=deterministic)
    parts = replace(training_parts(config), model=Asking())
    made = Trainer(config, parts, make_accelerator(config))
    advance(made, 2)
    assert made.arithmetic.ready
    assert parts.model.held is deterministic
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(("kernels", "inside"), [(repeatable_kernels, (True, False)), (any_kernels, (False, True))])
def test_what_cudnn_may_choose_is_as_before_afterwards(kernels, inside, monkeypatch):
    for before in ((False, False), (True, True)):
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", before[0])
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", before[1])
        with kernels():
            assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == inside
        assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == before


def test_a_transformer_gives_up_one_thing_after_another_until_it_can_be_recorded(monkeypatch):
    monkeypatch.setattr(choose, "why_not", lambda *_: None)
    tried, capture = [], partial_method(GraphedStep.capture, record=False)

    def failing_twice(self):
        if self.try_cudnn:
            blocks.attend_by_cudnn(self.model)  # as if it had been tried out
        tried.append((blocks.attends_by_cudnn(self.model), self.by_region))
        if self.by_region:
            raise RuntimeError("no such kernel\nand more")
        return capture(self)

    monkeypatch.setattr(GraphedStep, "capture", failing_twice)
    config, told = tiny(fast="always"), []
    made = Trainer(config, training_parts(config), make_accelerator(config), told.append)
    advance(made, 3)
    assert tried == [(True, True), (False, True), (False, False)]
    assert made.arithmetic.ready
    assert [line.endswith("(no such kernel)") for line in told] == [False, True, True]
    assert all("forward" not in module.__dict__ for module in made.model.modules())
