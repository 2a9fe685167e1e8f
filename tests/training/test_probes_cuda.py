"""Probes of the network on a GPU: recorded ones against plain ones, resuming, and falling back."""

import warnings
from contextlib import nullcontext

import pytest
import torch

from noisewise.feedback import at_precision, differentiate, evaluate, preserved_random_state, set_aside_gradients
from noisewise.training.fast import GraphedStep
from noisewise.training.fast import recording as recordings
from tests.training.test_fast_cuda import differences, trainer
from tests.training.tiny import Own

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DROPPING = '--model.options={"channels": 32, "multipliers": [1, 2], "blocks": 1, "attention": [4], "dropout": 0.1}'
SAMPLERS = {  # each with how many recordings it needs
    "paper_cifar10:every=4": 3,  # its draws, one image at all timesteps, all images at some
    "paper_cifar10:every=4,precision=bf16": 3,
    "adaptive:estimator=reinforce,every=4": 2,
    "gradient_variance:strata=3,every=4": 1,
    "adaptive:estimator=lookahead,strata=3,budget=3,warmup=5,horizon=2": 2,
}


@pytest.fixture(autouse=True, scope="module")
def uncompiled():
    """Recording without the compiler, which takes its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphedStep, "_compiled", lambda self: self.call)
        yield


@pytest.fixture(scope="module")
def made(uncompiled):
    one = trainer(DROPPING, "--sampler=uniform")
    one.warm_up()
    assert one.arithmetic.ready
    for _ in range(20):
        one.training_step()
    return one


def both(made):
    """Losses as samplers get them, and those of the plain path."""
    x0, labels = made.batches.get(made.samples)
    labels = labels if made.parts.classes else None
    return made.arithmetic.probes(x0, labels), made.loss_at(x0, labels)


def levels(count):
    return torch.arange(count, device="cuda") % 32, torch.linspace(0.01, 0.99, count, device="cuda")


@pytest.mark.parametrize(("precision", "tolerance"), [(None, 2e-2), ("float32", 2e-5), ("tf32", 4e-3), ("bf16", 2e-2)])
def test_recorded_losses_are_those_of_the_plain_path_also_of_weights_that_moved(made, precision, tolerance):
    rows, u = levels(150)
    seen = []
    for seed in (3, 4):
        found, wanted = (
            evaluate(at_precision(one, precision, made.network), rows, u, most=60, seed=seed, model=made.model)
            for one in both(made)
        )
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * float(wanted.mean()))
        seen.append(found)
        made.training_step()
    assert not torch.allclose(*seen, rtol=1e-3)
    prober = made.arithmetic.prober
    assert prober.reasons == {}
    assert prober.recorded >= 1


def test_one_seed_gives_one_noise_and_one_dropout_and_another_another(made):
    recorded, _ = both(made)
    rows, u = levels(32)
    found = [evaluate(recorded, rows, u, most=32, seed=seed, model=made.model) for seed in (1, 2, 1)]
    assert torch.equal(found[0], found[2])
    assert not torch.allclose(found[0], found[1], rtol=1e-3)


def test_precisions_differ_and_each_keeps_its_own(made):
    recorded, _ = both(made)
    rows, u = levels(32)
    kinds = ("float32", "tf32", "bf16", "float32", "tf32", "bf16")
    found = [evaluate(recorded.at_precision(kind), rows, u, most=32, seed=1, model=made.model) for kind in kinds]
    assert all(torch.equal(found[i], found[i + 3]) for i in range(3))
    error = [float((one - found[0]).abs().mean()) for one in found[:3]]
    assert error[1] < error[2]


@pytest.mark.parametrize("count", [12, 32])
def test_recorded_gradients_are_those_of_the_plain_path_and_leave_the_steps_own_alone(made, count):
    rows, u = levels(count)
    weight = torch.linspace(0.5, 1.5, count, device="cuda")
    for _ in range(2):
        grads = [parameter.grad for parameter in made.parameters]
        values = [gradient.clone() for gradient in grads]
        found = []
        for loss_at in both(made):
            with preserved_random_state(5), set_aside_gradients(made.parameters) as backward:
                differentiate(loss_at, rows, u, weight, backward)
                found.append(torch.cat([parameter.grad.flatten() for parameter in made.parameters]))
        assert float((found[0] - found[1]).norm() / found[1].norm()) < 5e-2
        assert all(parameter.grad is gradient for parameter, gradient in zip(made.parameters, grads, strict=True))
        assert all(torch.equal(gradient, value) for gradient, value in zip(grads, values, strict=True))
        made.training_step()
    assert made.arithmetic.prober.reasons == {}


def test_a_hook_is_called_as_long_as_it_is_there(made):
    recorded, _ = both(made)
    rows, u = levels(32)
    heard, found = [], []
    for hooked in (False, True, False):
        handle = made.network.register_forward_hook(lambda *_: heard.append(1)) if hooked else None
        found.append(evaluate(recorded, rows, u, most=32, seed=1, model=made.model))
        if handle is not None:
            handle.remove()
    assert heard == [1]
    assert torch.equal(found[0], found[2])
    assert made.arithmetic.prober.reasons == {}


def test_replays_do_not_wait_for_the_device(made):
    recorded, _ = both(made)
    rows, u = levels(32)
    for again in (False, True):
        torch.cuda.set_sync_debug_mode("error" if again else "default")
        try:
            with torch.no_grad():
                recorded(rows, u)
                recorded.at_precision("float32")(rows, u)
            recorded.gradients(rows, u, torch.ones_like(u))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert made.arithmetic.prober.reasons == {}


def test_probes_between_gradients_and_update_change_neither():
    ends = []
    for probed in (False, True):
        one = trainer(DROPPING, "--sampler=uniform")
        one.warm_up()
        for _ in range(3):
            one.arithmetic.begin(one.step)
            torch.cuda.manual_seed(one.step)
            x0, _ = one.batches.get(one.samples)
            draw = one.sampler.sample(x0)
            losses = one.arithmetic.backward(x0, None, draw)
            if probed:
                recorded = one.arithmetic.probes(x0, None)
                with torch.no_grad(), preserved_random_state():
                    for kind in ("float32", "bf16"):
                        recorded.at_precision(kind)(*levels(200))
                with preserved_random_state():
                    recorded.gradients(*levels(16), torch.ones(16, device="cuda"))
            one.arithmetic.update([draw], [losses])
            one.step, one.samples = one.step + 1, one.samples + one.config.batch
        if probed:
            assert one.arithmetic.prober.recorded == 3
        ends.append(torch.cat([value.detach().flatten() for value in one.parameters]))
    assert torch.equal(*ends)


def test_recorded_draws_are_those_of_the_plain_path_also_of_a_policy_that_moved():
    one = trainer(DROPPING, "--sampler=paper_cifar10:every=2")
    one.warm_up()
    for _ in range(6):
        one.training_step()
        x0, _ = one.batches.get(one.samples)
        mine = one.arithmetic.draw(one.sampler, x0)
        one.sampler.micro -= 1
        theirs = one.sampler.sample(x0)
        one.sampler.micro -= 1
        torch.testing.assert_close(mine.u, theirs.u, rtol=1e-3, atol=1e-4)  # TF32 convolutions of the policy
        torch.testing.assert_close(mine.density, theirs.density, rtol=1e-3, atol=1e-3)
    assert one.arithmetic.prober.reasons == {}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_probe_in_graphs(sampler):
    one = trainer(DROPPING, f"--sampler={sampler}", "--steps=13")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*kernel by kernel.*")
        for _ in one.run():
            pass
    prober = one.arithmetic.prober
    assert (prober.why_not, prober.recorded) == (None, SAMPLERS[sampler])
    assert one.step == 13


@pytest.mark.parametrize(
    "sampler",
    [
        "paper_cifar10:every=5",
        "gradient_variance:strata=3,every=4",
        "adaptive:estimator=lookahead,strata=3,budget=3,warmup=5,horizon=2",
    ],
)
def test_it_goes_on_bit_for_bit_with_probes(sampler, tmp_path):
    assert differences(lambda: trainer(DROPPING, f"--sampler={sampler}"), tmp_path) == []


class WaitsWhenProbed(Own):
    """Looks at its own numbers where no gradients flow."""

    def forward(self, x, time):
        if not torch.is_grad_enabled() and float(x.mean()) > 1e9:
            return x
        return super().forward(x, time)


@pytest.mark.parametrize("unforeseen", [False, True])
def test_where_probes_cannot_be_recorded_the_run_goes_on_as_on_the_plain_path(unforeseen, monkeypatch):
    if unforeseen:  # it fails half way through the recording
        monkeypatch.setattr(recordings, "waiting_is_an_error", nullcontext)
    rows = {}
    for fast in ("auto", "never"):
        torch.manual_seed(0)
        options = ["--sampler=paper_cifar10:every=5", "--precision=fp32", "--steps=30", f"--fast={fast}"]
        one = trainer(*options, model=WaitsWhenProbed(16))
        if fast == "never":
            rows[fast] = [row for row in one.run() if row]
            continue
        with pytest.warns(RuntimeWarning, match="kernel by kernel") as heard:
            rows[fast] = [row for row in one.run() if row]
        assert len([note for note in heard if "kernel by kernel" in str(note.message)]) == 1
        step = one.arithmetic
        assert step.ready
        assert list(step.prober.reasons) == ["losses"]
        found = []
        for seed in (1, 2, 1):  # the graphs of the step still hear what the generator is told
            torch.cuda.manual_seed(seed)
            step.run_gradients()
            found.append(step.micro_losses.clone())
        assert torch.equal(found[0], found[2])
        assert not torch.allclose(found[0], found[1], rtol=1e-3)
    for mine, theirs in zip(rows["auto"], rows["never"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=3e-2)
