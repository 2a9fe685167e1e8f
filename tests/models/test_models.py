"""What every network owes the trainer."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load as safetensors_load
from safetensors.torch import save as safetensors_save
from torch.nn import functional as F

from noisewise.models import MODELS, DiT, build_model
from noisewise.models.transformer import sinusoid
from tests.models.small_models import CLASSES, SHAPE, SMALL, batch, small, stirred

ODD = [
    ("unet", (3, 8, 4), {"channels": 8, "multipliers": [1], "attention": [], "blocks": 2}),
    ("unet", (2, 12, 8), {"channels": 12, "multipliers": [1, 3], "attention": [12, 6], "head_channels": 4, "groups": 3}),
    ("unet", (1, 8, 8), {"channels": 8, "multipliers": [1, 2, 2, 2], "attention": [1, 2], "zero_init": False}),
    ("dit", (3, 8, 4), {"width": 24, "depth": 1, "heads": 3, "patch": 1, "dropout": 0.2}),
    ("dit", (2, 9, 6), {"width": 16, "depth": 1, "heads": 1, "patch": 3, "mlp_ratio": 1.5}),
    ("uvit", (3, 8, 4), {"width": 24, "depth": 1, "heads": 3, "patch": 4, "dropout": 0.2, "time_mlp": True}),
    ("uvit", (2, 9, 6), {"width": 9, "depth": 5, "heads": 1, "patch": 3, "final_conv": False}),
]


@pytest.mark.parametrize("classes", [0, CLASSES])
@pytest.mark.parametrize(("name", "shape", "options"), [(name, SHAPE, SMALL[name]) for name in SMALL] + ODD)
def test_output_has_the_shape_of_the_input(name, shape, options, classes):
    model = build_model(name, options, shape=shape, classes=classes)
    x, time = batch(3, shape)
    labels = torch.tensor([0, 1, classes]) if classes else None
    for when in (time, time.float() / 1000, time.double(), time.int()):
        output = model(x, when, labels)
        assert output.shape == x.shape
        assert output.isfinite().all()


@pytest.mark.parametrize("name", ["unet", "dit"])
def test_output_starts_at_zero(name):
    model = small(name, CLASSES)
    assert torch.equal(model(*batch(), torch.arange(4)), torch.zeros(4, *SHAPE))


def test_dit_starts_every_block_as_the_identity():
    model, tokens, condition = small("dit"), torch.randn(2, 16, 32), torch.randn(2, 32)
    assert all(torch.equal(block(tokens, condition), tokens) for block in model.blocks)
    assert not torch.equal(stirred(model).blocks[0](tokens, condition), tokens)


def test_unet_without_zero_init_and_uvit_start_elsewhere():
    assert small("unet", zero_init=False)(*batch()).std() > 0.01
    assert small("uvit")(*batch()).std() > 0.01


def test_unet_starts_every_residual_branch_at_zero():
    weights = small("unet").net.state_dict()
    zero = {name for name, value in weights.items() if name.endswith("weight") and not value.any()}
    residual = {name for name in weights if name.endswith(("conv2.weight", "to_out.0.weight", "conv_out.weight"))}
    assert zero == residual
    assert len(residual) == 13  # 8 residual blocks, 4 attentions, the output


@pytest.mark.parametrize("name", MODELS)
def test_initialisation_follows_the_seed_alone(name):
    one, same, other = small(name, CLASSES), small(name, CLASSES), small(name, CLASSES, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_overfits_four_samples_and_uses_time_and_labels(name):
    """The inputs are equal, so only time and label can tell the four targets apart."""
    model = small(name, CLASSES)
    torch.manual_seed(3)
    x = torch.randn(1, *SHAPE).expand(4, -1, -1, -1)
    target = torch.randn(4, 1, 4, 4).repeat_interleave(2, 2).repeat_interleave(2, 3)
    time, labels = torch.tensor([10, 10, 700, 700]), torch.tensor([2, CLASSES, 2, CLASSES])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x, time, labels), target)
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.15 * float(target.square().mean())


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_gets_a_gradient(name):
    model = stirred(small(name, CLASSES))
    model(*batch(CLASSES + 1), torch.arange(CLASSES + 1)).square().sum().backward()
    assert [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("name", MODELS)
def test_labels_matter_and_none_is_the_null_class(name):
    model, (x, time) = stirred(small(name, CLASSES)), batch()
    null = model(x, time, torch.full((4,), CLASSES))
    assert torch.equal(model(x, time), null)
    differences = (model(x, time, torch.tensor([0, CLASSES, 9, 1])) - null).abs().amax((1, 2, 3))
    assert (differences[[0, 2, 3]] > 1e-3).all()
    assert differences[1] < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_time_scale_multiplies_the_time(name):
    plain, scaled = stirred(small(name)), stirred(small(name, time_scale=1000.0))
    x, _ = batch()
    time = torch.tensor([0.125, 0.25, 0.5, 0.75])
    assert torch.equal(scaled(x, time), plain(x, time * 1000))
    assert not torch.allclose(scaled(x, time), plain(x, time), atol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_autocast_tells_neighbouring_timesteps_apart(name):
    """998 and 999 are the same number in bfloat16."""
    model = stirred(small(name))
    x = torch.randn(1, *SHAPE, generator=torch.Generator().manual_seed(0)).expand(2, -1, -1, -1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(x, torch.tensor([998, 999]))
        low = sinusoid(torch.tensor([998, 999]), 16)
    assert low.dtype == torch.float32
    torch.testing.assert_close(output.float(), model(x, torch.tensor([998, 999])), rtol=0.1, atol=0.25)
    assert not torch.equal(output[0], output[1])


@pytest.mark.parametrize("name", MODELS)
def test_runs_in_pure_bfloat16(name):
    model, (x, time) = stirred(small(name, CLASSES)), batch()
    expected = model(x, time)
    output = model.bfloat16()(x.bfloat16(), time)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=0.1, atol=0.25)


@pytest.mark.parametrize("name", MODELS)
def test_compiles_into_one_graph(name):
    model, (x, time) = stirred(small(name, CLASSES)), batch()
    labels = torch.arange(4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, time, labels), model(x, time, labels))


@pytest.mark.parametrize("name", MODELS)
def test_weights_survive_safetensors(name):
    model, other = stirred(small(name, CLASSES)), small(name, CLASSES, seed=5).eval()
    other.load_state_dict(safetensors_load(safetensors_save(model.state_dict())))
    x, time = batch()
    assert torch.equal(other(x, time), model(x, time))
    assert "position" not in DiT(SHAPE, width=32, depth=1, heads=1).state_dict()


@pytest.mark.parametrize("name", MODELS)
def test_dropout_is_active_in_training_alone(name):
    model, (x, time) = stirred(small(name, dropout=0.5)), batch()
    assert torch.equal(model(x, time), model(x, time))
    model.train()
    assert not torch.equal(model(x, time), model(x, time))


def test_only_the_unet_needs_diffusers():
    code = (
        "import sys; sys.modules['diffusers'] = None\n"
        "import torch\n"
        "from noisewise.models import build_model\n"
        "for name in ('dit', 'uvit'):\n"
        "    model = build_model(name, {'width': 8, 'depth': 1, 'heads': 1}, shape=(1, 4, 4))\n"
        "    assert model(torch.zeros(1, 1, 4, 4), torch.zeros(1)).shape == (1, 1, 4, 4)\n"
        "try:\n"
        "    build_model('unet', {}, shape=(3, 32, 32))\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install noisewise[train]" in result.stdout
