"""Recorded forward passes on a GPU: the same numbers as plain calls, with the weights of the day, and no waiting."""

import gc

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn

from noisewise import DDPM, Objective
from noisewise.data import Synthetic
from noisewise.generation.images import generate, generate_batches
from noisewise.generation.replay import KEPT, Replay
from noisewise.generation.sets import fill, image_set
from noisewise.generation.solvers import Solver
from noisewise.generation.trained import load_trained, placed
from noisewise.metrics.features import features
from noisewise.metrics.heldout import held_out_losses
from noisewise.models import UNet, with_labels
from noisewise.precision import full_float32
from noisewise.training.config import CheckpointConfig, ModelConfig
from noisewise.training.fast.graphs import waiting_is_an_error
from noisewise.training.run import train
from tests.training.tiny import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHAPE, CLASSES = (3, 16, 16), 4
OBJECTIVE = Objective(DDPM.linear())
SOLVER = Solver("ddim", 6)
AUTOCAST = pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16"])
CACHED = pytest.mark.parametrize("wanted", [False, True], ids=["frozen", "trainable"])  # autocast caches casts of the latter


def unet(classes=CLASSES, seed=0, **options):
    torch.manual_seed(seed)
    options = {"channels": 32, "multipliers": (1, 2), "attention": (8,), "blocks": 1, "zero_init": False} | options
    return UNet(SHAPE, classes, **options).cuda().eval()


def inputs(n=5, seed=0, classes=CLASSES):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(n, *SHAPE, device="cuda", generator=generator)
    time = torch.randint(0, 1000, (n,), device="cuda", generator=generator)
    return x, time, torch.randint(0, classes, (n,), device="cuda", generator=generator) if classes else None


def precision(autocast):
    return torch.autocast("cuda", torch.bfloat16, enabled=autocast)


def plain(model, *given, autocast=False):
    """The numbers of a plain call; in an autocast block of its own, whose cache of casts is empty."""
    with torch.no_grad(), precision(autocast):
        return with_labels(model)(*given)


def nudge(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9).add_(0.01)


# The wrapper -------------------------------------------------------------------------------------------------------------


@AUTOCAST
@CACHED
@pytest.mark.parametrize("classes", [0, CLASSES])
@torch.no_grad()
def test_replayed_equals_called_exactly(autocast, wanted, classes):
    model = unet(classes).requires_grad_(wanted)
    replay = Replay(with_labels(model), model)
    with precision(autocast):
        found = [replay(*inputs(seed=seed, classes=classes)) for seed in range(5)]
    assert (replay.recorded, replay.why_not) == (1, None)
    for seed, output in enumerate(found):  # also the first ones: an output belongs to the caller
        assert torch.equal(output, plain(model, *inputs(seed=seed, classes=classes), autocast=autocast))


@AUTOCAST
@CACHED
@torch.no_grad()
def test_weights_that_change_in_place_are_used_from_then_on(autocast, wanted):
    model = unet().requires_grad_(wanted)
    replay = Replay(with_labels(model), model)
    with precision(autocast):
        for _ in range(3):
            before = replay(*inputs())
    assert replay.recorded == 1
    nudge(model)
    expected = plain(model, *inputs(), autocast=autocast)
    with precision(autocast):
        assert torch.equal(replay(*inputs()), expected)
    assert replay.recorded == 1
    assert not torch.allclose(before, expected, atol=1e-3)


@torch.no_grad()
def test_casts_are_inside_the_graph_even_if_the_model_opens_autocast_itself_within_the_callers_block():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = unet()

        def forward(self, x, time, labels=None):
            with torch.autocast("cuda", torch.bfloat16):  # as accelerate's models do; its cache is on
                return self.net(x, time, labels).float()

    model = Inner().eval()
    replay = Replay(model, model)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        for _ in range(3):
            replay(*inputs())
    nudge(model)
    expected = plain(model, *inputs(), autocast=True)
    junk = [torch.randn(1 << 20, device="cuda") for _ in range(64)]  # written over whatever was freed
    assert torch.equal(replay(*inputs()), expected)  # outside a block: another key, called
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        assert torch.equal(replay(*inputs()), expected)
    assert replay.recorded == 1
    del junk


@torch.no_grad()
def test_a_batch_of_another_size_is_called_first_and_few_recordings_are_kept():
    model = unet()
    replay = Replay(with_labels(model), model)
    for _ in range(3):
        replay(*inputs(5))
    assert torch.equal(replay(*inputs(3)), plain(model, *inputs(3)))
    assert replay.recorded == 1
    for n in range(6, 6 + KEPT + 2):
        for _ in range(2):
            replay(*inputs(n))
    assert replay.recorded == KEPT
    for n in (5, 6 + KEPT, 7 + KEPT):  # recordings share their memory and still do not disturb each other
        for seed in range(3):
            assert torch.equal(replay(*inputs(n, seed)), plain(model, *inputs(n, seed)))


@torch.no_grad()
def test_precision_of_float32_is_that_of_the_call_not_of_the_recording():
    model = unet()
    replay = Replay(with_labels(model), model)
    for _ in range(3):
        replay(*inputs())
    with full_float32():
        expected = plain(model, *inputs())
        assert all(torch.equal(replay(*inputs()), expected) for _ in range(3))
    assert replay.recorded == 2


class Waits(nn.Module):
    def forward(self, x, time, labels=None):
        return x * (2.0 if x.mean().item() > 0 else -1.0)


class Noisy(nn.Module):
    def forward(self, x, time, labels=None):
        return x + torch.randn_like(x)


@torch.no_grad()
def test_a_model_that_waits_for_the_device_is_called_for_good():
    model, (x, time, _) = Waits().eval(), inputs()
    replay = Replay(model, model)
    for sign in (1, -1, 1, -1):
        moved = x.abs() * sign
        assert torch.equal(replay(moved, time), moved * (2.0 if sign > 0 else -1.0))
    assert replay.recorded == 0
    assert "synchroniz" in replay.why_not
    torch.manual_seed(0)
    torch.randn(3, device="cuda")  # the generator is as usable as before


@torch.no_grad()
def test_recording_leaves_the_random_state_alone_and_noise_is_drawn_as_in_calls():
    model, (x, time, _) = Noisy().eval(), inputs()
    torch.manual_seed(5)
    expected = [model(x, time) for _ in range(4)]
    torch.manual_seed(5)
    replay = Replay(model, model)
    found = [replay(x, time) for _ in range(4)]
    assert replay.recorded == 1
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_training_mode_gradients_and_hooks_are_called():
    model = unet()
    replay = Replay(with_labels(model), model)
    for _ in range(3):
        assert replay(*inputs()).requires_grad
    with torch.no_grad():
        model.train()
        for _ in range(3):
            replay(*inputs())
        model.eval()
        assert replay.recorded == 0
        heard = []
        model.net.mid_block.register_forward_hook(lambda *_: heard.append(1))
        for _ in range(3):
            replay(*inputs())
    assert len(heard) == 3
    assert "net.mid_block" in replay.why_not


@torch.no_grad()
def test_a_hook_that_comes_after_the_recording_is_called():
    model, heard = unet(), []
    replay = Replay(with_labels(model), model)
    for _ in range(3):
        replay(*inputs())
    assert replay.recorded == 1
    model.net.mid_block.register_forward_hook(lambda *_: heard.append(1))
    for _ in range(3):
        replay(*inputs())
    assert len(heard) == 3
    assert replay.recorded == 0


@torch.no_grad()
def test_weights_that_lie_elsewhere_or_have_another_type_are_used_from_then_on():
    model = unet()
    replay = Replay(with_labels(model), model)
    for change in (lambda: model.cpu().cuda(), model.bfloat16, lambda: nudge(model), model.float):
        for _ in range(3):
            replay(*inputs())
        assert replay.recorded == 1
        change()
        junk = [torch.randn(1 << 20, device="cuda") for _ in range(64)]  # written over whatever was freed
        given = [value.to(model.net.conv_in.weight.dtype) if value.is_floating_point() else value for value in inputs()]
        expected = plain(model, *given)
        assert all(torch.equal(replay(*given), expected) for _ in range(3))
        model.float()
        del junk


class Refuses(nn.Module):
    def forward(self, x, time, labels=None):
        doubled = 2 * x
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not while it is recorded")
        return doubled


@torch.no_grad()
def test_after_a_recording_that_failed_graphs_from_before_still_follow_the_seed():
    noise, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # as a training step
        noise.normal_()
    torch.manual_seed(7)
    graph.replay()
    expected = noise.clone()
    model, (x, time, _) = Refuses().eval(), inputs()
    replay = Replay(model, model)
    assert all(torch.equal(replay(x, time), 2 * x) for _ in range(3))
    assert replay.why_not == "not while it is recorded"
    torch.manual_seed(7)
    graph.replay()
    assert torch.equal(noise, expected)


@torch.no_grad()
def test_a_dropped_replay_gives_its_memory_back():
    model = unet(channels=64)
    plain(model, *inputs(1024))
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    replay = Replay(with_labels(model), model)
    for _ in range(3):
        replay(*inputs(1024))
    assert replay.recorded == 1
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved() - before
    del replay
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < held / 4


# What uses it ------------------------------------------------------------------------------------------------------------


@AUTOCAST
def test_generated_images_are_those_of_a_plain_function(autocast):
    model = unet()
    settings = {"solver": SOLVER, "classes": CLASSES, "guidance": 2.0, "interval": (0.2, 0.8), "batch": 4, "device": "cuda"}
    with precision(autocast):
        expected = generate(lambda *given: model(*given), OBJECTIVE, SHAPE, 11, **settings)
    with precision(autocast):
        found = generate(model, OBJECTIVE, SHAPE, 11, **settings)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["ddim", "ddpm", "dpmpp", "heun"])
def test_the_host_does_not_wait_while_a_batch_is_generated(name):
    model = unet()
    replay = Replay(with_labels(model), model)
    settings = {"solver": Solver(name, 6), "classes": CLASSES, "guidance": 2.0, "batch": 4, "device": "cuda"}
    batches = generate_batches(replay, OBJECTIVE, SHAPE, range(12), **settings)
    next(batches)
    assert replay.recorded == 1
    with waiting_is_an_error():
        numbers, _ = next(batches)
    assert numbers.tolist() == [4, 5, 6, 7]


def test_held_out_losses_are_those_of_a_plain_function():
    model, source = unet(), Synthetic(SHAPE, count=10)
    settings = {"levels": 8, "batch": 4, "device": "cuda"}
    expected = held_out_losses(lambda *given: model(*given), OBJECTIVE, source, **settings)
    found = held_out_losses(model, OBJECTIVE, source, **settings)
    assert torch.equal(found.loss, expected.loss)
    assert found.loss.device.type == "cpu"


def test_a_recorded_network_gives_the_same_features():
    torch.manual_seed(0)
    network = (
        nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 16)).cuda().eval().requires_grad_(False)
    )
    images = torch.randint(0, 256, (50, 1, 8, 8), dtype=torch.uint8)
    replay = Replay(network, network)
    found = features(images, replay, "digits", "cuda", batch=16)
    assert replay.recorded == 1
    assert torch.equal(found, features(images, network, "digits", "cuda", batch=16))


def test_a_placed_model_is_fused_and_the_same_within_rounding():
    model = unet()
    with full_float32():
        expected = plain(model, *inputs())
        found = plain(placed(model, SHAPE, 0, "cuda"), *inputs())
        assert not torch.equal(found, expected)  # other kernels
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_where_our_kernels_do_not_run_a_placed_model_is_the_plain_one(monkeypatch):
    from noisewise.training.fast import kernels

    monkeypatch.setattr(kernels, "forward", None)
    model = unet()
    with full_float32():
        expected = plain(model, *inputs())
        found = plain(placed(model, SHAPE, 0, "cuda"), *inputs())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def on_any_device():
    """Accelerate keeps the device of the first run of a process for all others."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def test_a_trained_unet_makes_the_images_on_a_gpu_that_it_makes_on_the_cpu(tmp_path, on_any_device):
    options = {"channels": 16, "multipliers": [1, 2], "attention": [4], "blocks": 1}
    model = ModelConfig(name="unet", options=options)
    folder = train(tiny(model=model, checkpoint=CheckpointConfig(every=6), out=str(tmp_path / "run"), device="cpu"))
    pixels = []
    for device in ("cpu", "cuda"):
        trained = load_trained(folder, device=device)
        images = image_set(trained, tmp_path / device, 10, solver=Solver("ddim", 5), chunk=4)
        fill(images, trained, device=device)
        pixels.append(torch.cat(list(images.batches())).int())
    assert trained.call.recorded == 2  # chunks of four, and the last of two
    assert int((pixels[0] - pixels[1]).abs().max()) <= 1
