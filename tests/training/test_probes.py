"""What samplers ask of the network on the fast path, without a GPU: the same numbers on fixed buffers, and falling back."""

import time
import warnings

import pytest
import torch
from torch import nn

from noisewise.feedback import at_precision, differentiate, evaluate, preserved_random_state, set_aside_gradients
from noisewise.training.config import ModelConfig
from noisewise.training.fast import GraphedStep, choose, graphs, probes, recording
from tests.training.test_fast import fixed_buffers  # noqa: F401
from tests.training.tiny import DIT, advance, differing, own, tensors, tiny, trainer_of

MODELS = {
    "plain": own("Own"),
    "dropout": own("Own", dropout=0.3),
    "running statistics": own("Normed"),
    "classes": ModelConfig(name="dit", options=DIT, conditional=True),
}


def ready(**changes):
    made = trainer_of(tiny(**{"model": own("Own"), **changes}))
    made.warm_up()
    assert isinstance(made.arithmetic, GraphedStep)
    assert made.arithmetic.ready
    made.training_step()
    return made


def without_a_device(call, inputs):
    """What a recording is on a machine that has none: a failure."""
    return recording.Recording(call, inputs, None)


def both(made):
    """Losses as samplers get them, and those of the plain path."""
    x0, labels = made.batches.get(made.samples)
    labels = labels if made.parts.classes else None
    return made.arithmetic.probes(x0, labels), made.loss_at(x0, labels)


@pytest.mark.parametrize("precision", [None, "float32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_losses_are_those_of_the_plain_path(model, precision, fixed_buffers):  # noqa: F811
    made = ready(model=MODELS[model])
    rows, u = torch.arange(37) % 16, torch.linspace(0.01, 0.99, 37)
    for seed in (3, 4):  # with weights that have moved in between
        found, wanted = (
            evaluate(at_precision(one, precision, made.network), rows, u, most=16, seed=seed, model=made.model)
            for one in both(made)
        )
        assert torch.equal(found, wanted)
        made.training_step()
    assert made.arithmetic.prober.recorded == 1  # three calls of 13 rows, of which the last is filled up


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("count", [6, 16])
def test_gradients_are_those_of_the_plain_path_and_leave_no_trace(model, count, fixed_buffers):  # noqa: F811
    made = ready(model=MODELS[model])
    rows, u = torch.arange(count), torch.linspace(0.01, 0.99, count)
    weight = torch.linspace(-1, 1, count)
    before = tensors(made)
    grads = [parameter.grad for parameter in made.parameters]
    values = [gradient.clone() for gradient in grads]
    found = []
    for loss_at in both(made):
        with preserved_random_state(5), set_aside_gradients(made.parameters) as backward:
            buffers = [value.clone() for value in made.model.buffers()]
            differentiate(loss_at, rows, u, weight, backward)
            found.append([parameter.grad.clone() for parameter in made.parameters if parameter.grad is not None])
            for buffer, value in zip(made.model.buffers(), buffers, strict=True):
                buffer.copy_(value)
    assert len(found[0]) == len(found[1]) == len(made.parameters)
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    assert [parameter.grad for parameter in made.parameters] == grads
    assert all(torch.equal(gradient, value) for gradient, value in zip(grads, values, strict=True))
    after = tensors(made)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert made.arithmetic.prober.recorded == 1


def test_gradients_flow_through_losses_where_they_are_asked_for(fixed_buffers):  # noqa: F811
    made = ready()
    found = [loss_at(torch.arange(4), torch.full((4,), 0.5)) for loss_at in both(made)]
    assert all(losses.requires_grad for losses in found)
    assert made.arithmetic.prober.recorded == 0


def test_few_recordings_are_kept(fixed_buffers):  # noqa: F811
    made = ready()
    recorded, plain = both(made)
    with torch.no_grad():
        for count in range(1, probes.KEPT + 4):
            rows, u = torch.zeros(count, dtype=torch.int64), torch.full((count,), 0.5)
            with preserved_random_state(1):
                mine = recorded(rows, u)
            with preserved_random_state(1):
                assert torch.equal(mine, plain(rows, u))
    assert made.arithmetic.prober.recorded == probes.KEPT


def test_a_network_in_another_mode_is_recorded_anew(fixed_buffers):  # noqa: F811
    made = ready(model=own("Own", dropout=0.5))
    recorded, plain = both(made)
    rows, u = torch.arange(16), torch.full((16,), 0.5)
    for mode in (True, False, True):
        made.network.train(mode)
        with torch.no_grad(), preserved_random_state(1):
            mine = recorded(rows, u)
        with torch.no_grad(), preserved_random_state(1):
            assert torch.equal(mine, plain(rows, u))
    assert made.arithmetic.prober.recorded == 1


@pytest.mark.parametrize("sampler", ["paper_cifar10:every=3", "gradient_variance:strata=3,every=2"])
def test_where_recording_fails_the_run_goes_on_as_without_it_and_says_so_once(sampler, fixed_buffers, monkeypatch):  # noqa: F811
    config = tiny(model=own("Own", dropout=0.3), sampler=sampler)
    whole = trainer_of(config)
    rows = advance(whole, config.steps)
    monkeypatch.setattr(probes, "Buffered", without_a_device)
    made = trainer_of(config)
    with pytest.warns(RuntimeWarning, match="kernel by kernel") as heard:
        again = advance(made, config.steps)
    assert len([one for one in heard if "kernel by kernel" in str(one.message)]) == 1
    assert made.arithmetic.ready
    assert "CUDA" in made.arithmetic.prober.why_not
    assert made.arithmetic.prober.recorded == 0
    assert again == rows
    expected, found = tensors(whole), tensors(made)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_a_kind_of_probe_that_failed_is_not_tried_again(fixed_buffers, monkeypatch):  # noqa: F811
    monkeypatch.setattr(probes, "Buffered", without_a_device)
    made = ready()
    with pytest.warns(RuntimeWarning, match="kernel by kernel"), torch.no_grad():
        both(made)[0](torch.arange(4), torch.full((4,), 0.5))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        both(made)[0](torch.arange(5), torch.full((5,), 0.5))
    assert list(made.arithmetic.prober.reasons) == ["losses"]


def test_a_step_is_recorded_anew_where_the_generator_has_another_state(fixed_buffers, monkeypatch):  # noqa: F811
    config = tiny(model=own("Own", dropout=0.3), sampler="paper_cifar10:every=3")
    plain, made = trainer_of(config), trainer_of(config)
    rows = advance(plain, config.steps)
    first_rows = advance(made, 4)
    first = made.arithmetic.prober
    first.reasons["gradients"] = "of old"
    monkeypatch.setattr(graphs, "generators", graphs.generators + 1)
    capture = GraphedStep.capture

    def warming_up(self) -> None:  # as a recording does
        capture(self)
        with self._state_put_back():
            self.run_gradients()

    monkeypatch.setattr(GraphedStep, "capture", warming_up)
    again = advance(made, config.steps)
    assert made.arithmetic.ready
    assert made.arithmetic.prober is not first
    assert made.arithmetic.prober.reasons == {"gradients": "of old"}
    assert [*first_rows, *again] == rows
    assert differing(tensors(plain), tensors(made)) == []


def test_recording_is_off_the_clock(fixed_buffers, monkeypatch):  # noqa: F811
    class Slow(probes.Buffered):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            time.sleep(0.5)

    monkeypatch.setattr(probes, "Buffered", Slow)
    made = trainer_of(tiny(model=own("Own"), sampler="gradient_variance:strata=3,every=2"))
    made.warm_up()
    begun = time.perf_counter()
    for _ in range(3):
        made.timed_step()
    assert made.arithmetic.aside >= 0.5
    assert made.seconds <= time.perf_counter() - begun - 0.5


@pytest.mark.parametrize("sampler", ["paper_cifar10", "adaptive:estimator=reinforce", "mix:of=paper_cifar10,floor=0.2"])
def test_draws_are_those_of_the_plain_path(sampler, fixed_buffers):  # noqa: F811
    made = ready(sampler=sampler)
    for kind in ("as it is", "moved", "loaded"):
        if kind == "moved":
            with torch.no_grad():
                for name, value in made.sampler.named_parameters():
                    value.add_(0.01 * torch.randn_like(value)) if "policy" in name else None
        if kind == "loaded":
            made.sampler.load_state_dict(made.sampler.state_dict())
        x0, _ = made.batches.get(made.samples)
        mine = made.arithmetic.draw(made.sampler, x0)
        made.sampler.micro -= 1
        theirs = made.sampler.sample(x0)
        assert torch.equal(mine.u, theirs.u)
        assert torch.equal(mine.density, theirs.density)
    assert made.arithmetic.prober.recorded == 1


def test_a_plain_step_hands_samplers_the_plain_losses():
    made = trainer_of(tiny(model=own("Own")))
    x0, _ = made.batches.get(0)
    assert not hasattr(made.arithmetic.probes(x0, None), "gradients")


def test_the_step_that_cannot_be_recorded_hands_samplers_the_plain_losses(monkeypatch):
    monkeypatch.setattr(choose, "why_not", lambda *_: None)
    monkeypatch.setattr(choose, "fuse", lambda _: 0)
    monkeypatch.setattr(GraphedStep, "capture", lambda self: (_ for _ in ()).throw(RuntimeError("no")))
    made = trainer_of(tiny(model=own("Own"), sampler="paper_cifar10:every=3"))
    advance(made, 4)
    assert not made.arithmetic.ready
    x0, _ = made.batches.get(0)
    assert not hasattr(made.arithmetic.probes(x0, None), "gradients")


def test_parameters_that_are_not_trained_have_no_gradient(fixed_buffers):  # noqa: F811
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.frozen, self.unused = (nn.Parameter(torch.ones(1)) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x, time):
            return x * self.used * self.frozen

    made = trainer_of(tiny(model=own("Own")))
    step = made.arithmetic
    made.warm_up()
    step.network = Half()
    step.call = step.compiled = lambda x, time, labels=None: step.network(x, time)
    found = (
        probes.Probes(step, record=False)
        .of(*made.batches.get(0)[:1], None)
        .gradients(torch.arange(16), torch.full((16,), 0.5), torch.ones(16))
    )
    assert [parameter is step.network.used for parameter, _ in found] == [True]
