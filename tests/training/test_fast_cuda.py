"""The fast path on a GPU: fused kernels against torch's, recorded steps against plain ones, resuming, and falling back."""

import random

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn
from torch.nn import functional as F

from noisewise.analysis.moments_of_training import rewound
from noisewise.data import Synthetic
from noisewise.models.unet import UNet
from noisewise.training import checkpoint
from noisewise.training.components import build_parts
from noisewise.training.fast import GraphedStep
from noisewise.training.options import load_preset
from noisewise.training.parallel import make_accelerator
from noisewise.training.trainer import Trainer
from tests.training.test_cuda import SometimesNaN
from tests.training.tiny import Own, differing, tensors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
UNET = '--model.options={"channels": 32, "multipliers": [1, 2], "blocks": 1, "attention": [4], "dropout": 0.0}'
TINY = ["--batch=32", UNET, "--log.trackers=[]", "--device=cuda", "--log.every=10", "--steps=40"]


def trainer(*options: str, model: nn.Module | None = None, told: list[str] | None = None) -> Trainer:
    AcceleratorState._reset_state(True)
    config = load_preset("digits", *TINY, *options)
    parts = build_parts(config)
    if model is not None:
        parts = type(parts)(parts.objective, parts.source, model, parts.classes)
    return Trainer(config, parts, make_accelerator(config), told.append if told is not None else lambda _: None)


@pytest.fixture
def uncompiled(monkeypatch):
    """Recording without the compiler, which takes its time."""
    monkeypatch.setattr(GraphedStep, "_compiled", lambda self: self.call)


# Kernels -----------------------------------------------------------------------------------------------------------------


def reference(x, shift, norm):
    moved = x if shift is None else x + shift[:, :, None, None]
    return F.silu(F.group_norm(moved, norm.num_groups, norm.weight, norm.bias, norm.eps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "groups", "shifted"),
    [
        ((2, 64, 8, 8), 32, True),
        ((3, 96, 4, 4), 32, False),
        ((2, 192, 16, 16), 32, True),
        ((2, 128, 32, 32), 32, True),
        ((2, 24, 5, 7), 4, True),
        ((3, 64, 1, 1), 4, False),
        ((2, 64, 64, 64), 32, True),
        ((2, 384, 32, 32), 32, False),
        ((2, 32, 33, 47), 8, True),
    ],
)
def test_the_fused_normalisation_is_torchs(dtype, shape, groups, shifted):
    from noisewise.training.fast.norm import group_norm

    torch.manual_seed(0)
    norm = nn.GroupNorm(groups, shape[1]).cuda()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
    shift = torch.randn(shape[:2], device="cuda").requires_grad_() if shifted else None
    inputs = [value for value in (x, shift, norm.weight, norm.bias) if value is not None]
    y = group_norm(x, shift, norm)
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    gradient = torch.randn_like(y)
    found = torch.autograd.grad(y, inputs, gradient)
    exact = nn.GroupNorm(groups, shape[1]).cuda().double()
    exact.load_state_dict(norm.state_dict())
    x64, shift64 = (None if v is None else v.detach().double().requires_grad_() for v in (x, shift))
    wanted = reference(x64, shift64, exact)
    same = [value for value in (x64, shift64, exact.weight, exact.bias) if value is not None]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(y.double(), wanted, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(found, torch.autograd.grad(wanted, same, gradient.double()), strict=True):
        assert float((mine.double() - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6)) < tolerance


def test_a_part_of_the_channels_is_normalised_without_a_copy_and_alike():
    from noisewise.training.fast.norm import group_norm

    torch.manual_seed(0)
    norm = nn.GroupNorm(32, 64).cuda()
    both = torch.randn(4, 128, 8, 8, device="cuda").contiguous(memory_format=torch.channels_last)
    part = both[:, 64:]
    assert torch.equal(group_norm(part, None, norm), group_norm(part.clone(), None, norm))


def test_fused_dropout_drops_its_share_and_its_gradient_knows_which():
    from noisewise.training.fast.norm import group_norm

    norm = nn.GroupNorm(32, 64).cuda()
    x = torch.randn(64, 64, 16, 16, device="cuda").contiguous(memory_format=torch.channels_last).requires_grad_()
    torch.manual_seed(3)
    y = group_norm(x, None, norm, dropout=0.1)
    kept = y != 0
    assert float((~kept).float().mean()) == pytest.approx(0.1, abs=2e-3)
    assert abs(float(kept.float().mean((0, 2, 3)).std())) < 0.01  # no channel is favoured
    torch.testing.assert_close(y[kept], (reference(x, None, norm) / 0.9)[kept], rtol=1e-4, atol=1e-5)
    wanted = torch.autograd.grad((reference(x, None, norm) * kept / 0.9).sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], wanted, rtol=1e-3, atol=1e-4)
    torch.manual_seed(3)
    assert torch.equal(y, group_norm(x, None, norm, dropout=0.1))
    assert not torch.equal(y, group_norm(x, None, norm, dropout=0.1))


def test_a_fused_unet_has_the_same_names_outputs_and_gradients():
    from noisewise.training.fast.fuse import fuse

    torch.manual_seed(0)
    plain, fused = (
        UNet((3, 16, 16), channels=32, multipliers=(1, 2), attention=(8,), dropout=0.0, zero_init=False).cuda()
        for _ in range(2)
    )
    fused.load_state_dict(plain.state_dict())
    assert fuse(fused) > 5
    assert list(fused.state_dict()) == list(plain.state_dict())
    x, time = torch.randn(4, 3, 16, 16, device="cuda"), torch.arange(4, device="cuda") * 100
    outputs = [model(x, time) for model in (plain, fused)]
    torch.testing.assert_close(*outputs, rtol=2e-3, atol=2e-3)  # TF32 convolutions
    for output in outputs:
        output.square().mean().backward()
    for mine, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
        assert float((mine.grad - theirs.grad).norm() / theirs.grad.norm().clamp(min=1e-4)) < 2e-2


# Recorded steps ------------------------------------------------------------------------------------------------------------

SAMPLERS = [
    "uniform",
    "adaptive:warmup=5,every=5",
    "speed:k=5+minsnr",
    "paper_cifar10:every=10",
    "adaptive:estimator=lookahead,strata=4,budget=0.5,warmup=5",
    "gradient_variance:strata=3,every=5",
    "loss_moment",
    "uniform+learned",
]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_recorded_steps_train_as_plain_ones_do(sampler, uncompiled):
    told: list[str] = []
    fast = trainer(f"--sampler={sampler}", "--precision=fp32", told=told)
    rows = [row for row in fast.run() if row]
    assert fast.arithmetic.ready, told
    plain = trainer(f"--sampler={sampler}", "--precision=fp32", "--fast=never")
    for mine, theirs in zip(rows, (row for row in plain.run() if row), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=3e-2)
        assert mine["samples"] == theirs["samples"]
    assert fast.ema.updates == plain.ema.updates == 40
    assert fast.sampler.step == plain.sampler.step == 40


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_first_steps_are_the_same_to_many_digits(accumulation, uncompiled):
    made = [
        trainer("--sampler=speed", "--precision=fp32", f"--accumulation={accumulation}", f"--fast={fast}")
        for fast in ("auto", "never")
    ]
    for one in made:
        one.warm_up()
        for _ in range(3):
            one.training_step()
    values = [float(one.guard.loss_sum) for one in made]
    assert values[0] == pytest.approx(values[1], rel=1e-3)
    assert made[0].arithmetic.ready


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_branch_that_is_taken_back_trains_as_on_the_plain_path(accumulation, uncompiled):
    ends = []
    for fast in ("auto", "never"):
        made = trainer("--precision=fp32", f"--accumulation={accumulation}", f"--fast={fast}")
        made.warm_up()
        made.training_step()
        before = [value.detach().clone() for value in made.parameters]
        with rewound(made):  # which hides the gradients that a graph adds to
            for _ in range(3):
                made.training_step()
            ends.append(torch.cat([(value - old).flatten() for value, old in zip(made.parameters, before, strict=True)]))
        assert all(torch.equal(value, old) for value, old in zip(made.parameters, before, strict=True))
    assert float((ends[0] - ends[1]).norm() / ends[1].norm()) < 0.05


def test_recorded_steps_do_not_wait_for_the_device(uncompiled):
    made = trainer("--sampler=adaptive:warmup=0,every=1000", "--ema.ramp=true")
    made.warm_up()
    made.training_step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            made.training_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert made.arithmetic.ready


def test_it_goes_on_bit_for_bit_from_a_checkpoint(tmp_path, uncompiled):
    options = [
        "--sampler=adaptive:warmup=5,every=5",
        "--ema.ramp=true",
        '--model.options={"dropout": 0.1, "channels": 32, "multipliers": [1, 2], "blocks": 1, "attention": []}',
    ]
    assert differences(lambda: trainer(*options), tmp_path) == []


@pytest.mark.parametrize("compiled", [False, True])
def test_it_goes_on_bit_for_bit_with_attention_over_many_pixels(tmp_path, compiled, request):
    if not compiled:
        request.getfixturevalue("uncompiled")
    told: list[str] = []

    def make():
        AcceleratorState._reset_state(True)
        options = '--model.options={"channels": 64, "multipliers": [1, 2], "blocks": 1, "attention": [16], "dropout": 0.1}'
        config = load_preset("cifar10-small", options, "--batch=128", "--steps=40", "--log.every=10", "--log.trackers=[]")
        parts = build_parts(config, synthetic=True)
        parts = type(parts)(parts.objective, Synthetic((3, 32, 32), count=512), parts.model, parts.classes)
        return Trainer(config, parts, make_accelerator(config), told.append)

    assert differences(make, tmp_path) == []
    assert not any("bit for bit" in line for line in told)


TRANSFORMERS = {
    "dit": '{"width": 128, "depth": 3, "heads": 2, "patch": 2}',
    "uvit": '{"width": 128, "depth": 3, "heads": 2, "patch": 2}',
}


def transformer(name: str, *options: str, told: list[str] | None = None) -> Trainer:
    """Over 256 tokens, with weights that do not begin as the identity."""
    AcceleratorState._reset_state(True)
    settings = ["--process=flow", "--prediction=flow", "--batch=64", "--steps=40", "--log.every=10", "--log.trackers=[]"]
    settings += ["--optimizer.warmup=0", "--optimizer.lr=0.0005", "--sampler=uniform", "--device=cuda"]
    model = [f"--model.name={name}", f"--model.options={TRANSFORMERS[name]}"]
    config = load_preset("cifar10-small", *settings, *model, *options)
    parts = build_parts(config, synthetic=True)
    torch.manual_seed(0)
    for value in parts.model.parameters():
        if value.ndim > 1:
            nn.init.normal_(value, std=0.02)
    parts = type(parts)(parts.objective, Synthetic((3, 32, 32), count=512), parts.model, parts.classes)
    return Trainer(config, parts, make_accelerator(config), told.append if told is not None else lambda _: None)


@pytest.mark.parametrize("deterministic", ["true", "false"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_recorded_transformers_train_as_plain_ones_do(name, precision, deterministic, request):
    if (precision, deterministic) != ("bf16", "true"):
        request.getfixturevalue("uncompiled")
    told: list[str] = []
    options = (f"--precision={precision}", f"--deterministic={deterministic}")
    fast, plain = transformer(name, *options, told=told), transformer(name, *options, "--fast=never")
    rows = [[row for row in made.run() if row] for made in (fast, plain)]
    assert fast.arithmetic.ready
    assert fast.arithmetic.by_region, told
    losses, norms = ([[row[name] for row in some] for some in rows] for name in ("loss", "gradient_norm"))
    assert losses[0] == pytest.approx(losses[1], rel=3e-3 if precision == "bf16" else 1e-3)
    assert norms[0][0] == pytest.approx(norms[1][0], rel=3e-2)
    assert losses[1][-1] < 0.98 * losses[1][0]  # it learns, so gradients matter


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_transformer_goes_on_bit_for_bit_from_a_checkpoint(name, tmp_path):
    told: list[str] = []
    assert differences(lambda: transformer(name, told=told), tmp_path) == []
    assert not any("bit for bit" in line or "cannot be recorded" in line for line in told)


def test_attention_by_cudnn_is_torchs_and_repeats_itself_where_it_is_taken():
    from noisewise.models.dit import DiT
    from noisewise.training.fast.blocks import cudnn_attention, cudnn_repeats

    torch.manual_seed(0)
    qkv = torch.randn(8, 256, 3, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    parts = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    try:
        found = cudnn_attention(*parts)
    except RuntimeError as error:
        pytest.skip(f"no attention by cuDNN here: {error}")
    wanted = F.scaled_dot_product_attention(*(part.float() for part in parts))
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)
    of = torch.randn_like(found)
    ours, theirs = torch.autograd.grad(found, qkv, of)[0], torch.autograd.grad(wanted, qkv, of.float())[0]
    assert float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < 2e-2
    assert not cudnn_repeats(DiT((3, 64, 64), width=128, depth=1, heads=2), 8, torch.device("cuda"))  # 1024 tokens


def test_a_model_without_a_fixed_order_is_recorded_all_the_same_and_the_user_is_told(uncompiled):
    class Blurred(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(1, 1, 3, padding=1)

        def forward(self, x, time):
            small = F.adaptive_avg_pool2d(self.layer(x), 3)  # whose backward pass torch has in no fixed order
            return F.interpolate(small, scale_factor=8 / 3, mode="nearest")

    told: list[str] = []
    made = trainer("--steps=5", model=Blurred().cuda(), told=told)
    for _ in made.run():
        pass
    assert made.arithmetic.ready
    assert "up to rounding, not bit for bit" in told[-1]


def differences(make, tmp_path):
    """Names of tensors that differ between a whole run and one that was stopped and resumed."""
    whole = make()
    for _ in whole.run():
        pass
    first = make()
    for row in first.run():
        if row and row["step"] == 20:
            break
    path = checkpoint.save(tmp_path, first.step, first.tensors(), first.state())
    second = make()
    second.load(checkpoint.load(path))
    for _ in second.run():
        pass
    assert second.arithmetic.ready
    return differing(tensors(whole), tensors(second))


def test_a_skipped_step_is_skipped_in_a_graph_too(uncompiled):
    model = SometimesNaN()
    made = trainer("--sampler=uniform", "--precision=fp32", model=model)
    made.warm_up()
    assert made.arithmetic.ready
    made.training_step()
    weight = model.scale.detach().clone()
    model.broken.fill_(1)
    made.training_step()
    assert torch.equal(model.scale, weight)
    assert int(made.guard.skipped) == 1
    model.broken.fill_(0)
    made.training_step()
    assert not torch.equal(model.scale, weight)


class Waiting(nn.Module):
    """Looks at its own numbers on the way, as no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x, time):
        return x * self.scale * (1.0 if float(x.mean()) < 1e9 else 2.0)


def test_a_model_that_waits_for_the_device_trains_on_the_plain_path_and_the_user_is_told(uncompiled):
    told: list[str] = []
    made = trainer("--sampler=uniform", model=Waiting(), told=told)
    rows = [row for row in made.run() if row]
    assert rows[-1]["step"] == 40
    assert not made.arithmetic.ready
    assert told[-1].startswith("the plain path, not the fast one: the step cannot be recorded (")


def test_where_our_kernels_do_not_run_the_plain_path_is_without_them(uncompiled, monkeypatch):
    from noisewise.training.fast import kernels

    monkeypatch.setattr(kernels, "forward", None)
    told: list[str] = []
    made = trainer("--steps=5", told=told)
    for _ in made.run():
        pass
    assert made.step == 5
    assert not made.arithmetic.ready
    assert "the plain path" in told[-1]


class Chancy(Own):
    """Leaves out what goes past its layers by chance, as the host decides."""

    def forward(self, x, time):
        out = super().forward(x, time)
        return out + x if random.random() < 0.9 else out


def test_a_model_that_decides_by_chance_on_the_host_trains_on_the_plain_path(uncompiled):
    told: list[str] = []
    made = trainer("--sampler=uniform", model=Chancy(), told=told)
    for _ in made.run():
        pass
    assert not made.arithmetic.ready
    assert "random numbers were drawn on the host (random)" in told[-1]


def test_a_recording_that_fails_half_way_breaks_neither_generator_nor_allocator(uncompiled, monkeypatch):
    from noisewise.training.fast import graphs

    monkeypatch.setattr(graphs, "waiting_is_an_error", lambda: torch.enable_grad())
    told: list[str] = []
    made = trainer("--sampler=uniform", model=Waiting(), told=told)
    rows = [row for row in made.run() if row]
    assert rows[-1]["step"] == 40
    assert torch.randn(3, device="cuda").isfinite().all()
    large = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    cached = torch.cuda.memory_reserved()
    del large
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= cached - 2**28, "as if it were still recording"


@pytest.mark.slow
def test_a_compiled_and_recorded_unet_learns_and_generates():
    made = trainer("--sampler=adaptive", "--steps=200", "--log.every=50")
    rows = [row for row in made.run() if row]
    assert made.arithmetic.ready
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    assert not any("_orig_mod" in name for part in made.tensors().values() for name in part)
    made.model.eval()
    with torch.no_grad():
        assert made.call(torch.randn(7, 1, 8, 8, device="cuda"), torch.zeros(7, device="cuda"), None).isfinite().all()
