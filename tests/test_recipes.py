"""The front door: hooks against `observe` bit for bit, what a step closes, mistakes, state, and what a recipe shows."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import noisewise
from noisewise import DDPM, EDM, VE, Draw, Flow, Objective, Recipe, Uniform
from noisewise.listener import MOST, UNHEARD
from tests.loops import OBJECTIVE, WHERE, Door, Observed, assert_same
from tests.samplers.specs import ALL_SPECS, LEARNERS, SPECS
from tests.torchrun import fork_ranks
from tests.workers.recipes import main

CHANGING = [*LEARNERS, *SPECS["curriculum"], "adaptive:warmup=2,every=2+learned"]
CHEAP = "adaptive:warmup=2,every=2,strata=10"


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("spec", CHANGING)
def test_hooks_are_observe_bit_for_bit(spec, accumulate):
    door = Door(spec, accumulate=accumulate).run(12)
    assert door.recipe.sampler.step == 12
    assert_same(door, Observed(spec, accumulate=accumulate).run(12))


@pytest.mark.parametrize(
    ("spec", "accumulate", "fused"),
    [*((spec, *both) for spec in CHANGING for both in ((1, False), (2, True))), (CHEAP, 2, False), (CHEAP, 1, True)],
)
def test_steps_that_a_scaler_skips_teach_nothing(spec, accumulate, fused):
    """A fused optimizer is called on overflow too, and skips by itself."""
    settings = {"accumulate": accumulate, "bad": {0, 4, 5, 9}, "fused": fused}
    door = Door(spec, **settings).run(12)
    assert door.recipe.sampler.step == 8
    assert_same(door, Observed(spec, **settings).run(12))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zero", WHERE)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_wherever_gradients_are_zeroed_skipped_draws_are_forgotten(zero, accumulate, set_to_none):
    settings = {"accumulate": accumulate, "bad": {1, 4, 5}, "zero": zero, "set_to_none": set_to_none}
    assert_same(Door(CHEAP, **settings).run(8), Observed(CHEAP, **settings).run(8))


# Closures ---------------------------------------------------------------------------------------------------------------


class Closed(Door):
    """Draws and backward pass inside the closure, as Lightning does."""

    by_name = False

    def step(self):
        def closure():
            x0, loss_at = self.batch()
            draw = self.recipe.sample(x0)
            loss = self.recipe.loss(draw, loss_at(slice(None), draw.u), loss_at)
            self.optimizer.zero_grad()
            loss.backward()
            self.draws.append(draw)
            return loss.detach()

        loss = self.optimizer.step(closure=closure) if self.by_name else self.optimizer.step(closure)
        assert loss.shape == ()


class ClosedByName(Closed):
    by_name = True


@pytest.mark.parametrize("kind", [Closed, ClosedByName])
@pytest.mark.parametrize("spec", CHANGING)
def test_a_closure_that_is_called_once_is_the_plain_loop(spec, kind):
    assert_same(kind(spec).run(8), Observed(spec).run(8))


def test_a_closure_that_is_called_again_is_an_error():
    run = Closed(CHEAP)
    run.optimizer = torch.optim.LBFGS(run.model.parameters(), lr=1e-3)
    run.recipe.attach(run.optimizer)
    with pytest.raises(RuntimeError, match="LBFGS calls its closure more than once"):
        run.step()
    run.optimizer = torch.optim.LBFGS(run.model.parameters(), lr=1e-3, max_iter=1)
    run.recipe.attach(run.optimizer)
    run.step()
    assert run.recipe.sampler.step == 1


# What a step closes -----------------------------------------------------------------------------------------------------


@pytest.fixture
def door():
    return Door(CHEAP)


def one_batch(door, backward=True):
    x0, loss_at = door.batch()
    draw = door.recipe.sample(x0)
    loss = door.recipe.loss(draw, loss_at(slice(None), draw.u))
    if backward:
        loss.backward()
    return draw


def seen(door):
    """How many losses reached the learner."""
    return int(door.recipe.sampler.state_dict()["estimator.running.sums"][0].sum().round())


def test_a_batch_without_a_backward_pass_is_not_learned_from(door):
    one_batch(door, backward=False)  # as when its loss was not finite
    one_batch(door)
    door.optimizer.step()
    assert (door.recipe.sampler.step, seen(door)) == (1, 16)


def test_drop_forgets_what_was_handed_over(door):
    one_batch(door)
    door.recipe.drop()
    one_batch(door)  # its gradients were added to those of the first
    door.optimizer.step()
    assert (door.recipe.sampler.step, seen(door)) == (1, 16)


def test_losses_that_are_added_up_before_the_backward_pass_count_all(door):
    batches = [door.batch() for _ in range(2)]
    draws = [door.recipe.sample(x0) for x0, _ in batches]
    losses = [door.recipe.loss(draw, at(slice(None), draw.u)) for draw, (_, at) in zip(draws, batches, strict=True)]
    sum(losses).backward()
    door.optimizer.step()
    assert (door.recipe.sampler.step, seen(door)) == (1, 32)


def test_weigh_is_loss_before_its_mean():
    runs = [Door(CHEAP) for _ in range(2)]
    means = []
    for run, take in zip(runs, (Recipe.loss, lambda *given: Recipe.weigh(*given).mean()), strict=True):
        x0, loss_at = run.batch()
        draw = run.recipe.sample(x0)
        loss = take(run.recipe, draw, loss_at(slice(None), draw.u))
        loss.backward()
        run.optimizer.step()
        means.append(loss.detach())
    assert torch.equal(*means)
    assert_same(*runs)


def test_uniform_is_the_plain_mean():
    recipe = noisewise.recipe("uniform", Objective(Flow()))  # a velocity, whose weights would round
    losses = torch.rand(8)
    assert torch.equal(recipe.loss(recipe.sample(8), losses), losses.mean())


def test_another_optimizer_may_step_in_between(door):
    other = nn.Linear(1, 1)
    one_batch(door)
    other(torch.ones(1, 1)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert door.recipe.sampler.step == 0
    door.optimizer.step()
    door.optimizer.step()  # trains on nothing that was drawn
    assert door.recipe.sampler.step == 1


@pytest.mark.parametrize("dropped", [False, True])
def test_a_step_that_fails_teaches_nothing(door, dropped):
    one_batch(door)
    group = door.optimizer.param_groups[0]
    rate, group["lr"] = group["lr"], "fast"
    with pytest.raises(TypeError):
        door.optimizer.step()
    assert (door.recipe.sampler.step, seen(door)) == (0, 0)
    group["lr"] = rate
    if dropped:
        door.recipe.drop()
    door.optimizer.step()
    assert (door.recipe.sampler.step, seen(door)) == ((0, 0) if dropped else (1, 16))


def test_trial_steps_of_look_ahead_are_not_steps(monkeypatch):
    run = Door("adaptive:estimator=lookahead,strata=3,horizon=2,budget=1,probe=32,warmup=2")
    steps, observed, observe = [], [], run.recipe.sampler.observe
    run.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    monkeypatch.setattr(run.recipe.sampler, "observe", lambda *given: observed.append(1) or observe(*given))
    run.run(6)
    assert len(steps) > 6
    assert len(observed) == run.recipe.sampler.step == 6


def test_detach_stops_listening_and_attach_moves(door):
    one_batch(door)
    door.recipe.detach()
    door.optimizer.step()
    assert door.recipe.sampler.step == 0
    again = torch.optim.SGD(door.model.parameters(), lr=0.1)
    door.recipe.attach(door.optimizer)
    door.recipe.attach(again)
    one_batch(door)
    door.optimizer.step()
    assert door.recipe.sampler.step == 0
    again.step()
    assert door.recipe.sampler.step == 1


@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_optimizer_that_is_not_the_one_that_steps_is_told_of(set_to_none):
    door = Door(CHEAP, set_to_none=set_to_none)
    door.recipe.attach(torch.optim.Adam(door.model.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        door.run(UNHEARD)
    with pytest.warns(RuntimeWarning, match="never stepped.*attach the optimizer that really steps"):
        door.run(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        door.run(2 * UNHEARD)
    assert door.recipe.sampler.step == 0


def test_skipped_steps_between_others_are_not_told_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        door = Door(CHEAP, bad={step for step in range(3 * UNHEARD) if step % UNHEARD}).run(3 * UNHEARD)
    assert door.recipe.sampler.step == 3


def test_probes_run_under_the_autocast_of_the_loss():
    run, kinds = Door("adaptive:estimator=reinforce,every=1,strata=4,queue=3"), []
    run.inner[0].register_forward_hook(lambda module, inputs, output: kinds.append(output.dtype))
    x0, loss_at = run.batch()
    draw = run.recipe.sample(x0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = run.recipe.loss(draw, loss_at(slice(None), draw.u), loss_at)
    loss.backward()
    run.optimizer.step()
    assert len(kinds) > 2
    assert set(kinds) == {torch.bfloat16}


# What a draw offers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("process", [DDPM.linear(), Flow(), Flow(data_at=1), EDM(), VE()], ids=repr)
@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 3, 4, 4)])
def test_a_draw_knows_the_coefficients_of_its_noise_levels(process, shape):
    x0, noise = torch.randn(shape), torch.randn(shape)
    draw = noisewise.recipe("uniform", process).sample(x0)
    assert torch.equal(draw.alpha * x0 + draw.sigma * noise, process.add_noise(x0, noise, draw.u))
    assert draw.log_snr.shape == draw.alpha.shape == (6, *[1] * (len(shape) - 1))
    assert torch.equal(draw.log_snr.flatten(), process.log_snr(draw.u))


def test_coefficients_have_the_type_of_the_data_and_log_snr_that_of_u():
    recipe = noisewise.recipe("uniform", Flow())
    draw = recipe.sample(torch.randn(4, 2).bfloat16())
    assert (draw.alpha.dtype, draw.sigma.dtype, draw.log_snr.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert recipe.sample(torch.zeros(4, 2, dtype=torch.uint8)).alpha.dtype == torch.float32
    assert recipe.sample(4).alpha.shape == (4,)
    both = Draw.cat([recipe.sample(torch.randn(4, 2)), recipe.sample(torch.randn(3, 2))])
    assert both.sigma.shape == (7, 1)
    with pytest.raises(ValueError, match="knows no process"):
        _ = Draw(draw.u, draw.time, draw.weight, draw.density).alpha


# Validation -------------------------------------------------------------------------------------------------------------


def validate(run, how):
    x0, loss_at = torch.randn(16, 2), None
    if how == "eval":
        run.recipe.eval()
    with torch.no_grad() if how == "no_grad" else torch.inference_mode() if how == "inference" else torch.enable_grad():
        draws = [run.recipe.sample(x0) for _ in range(3)]
        for draw in draws:
            losses = OBJECTIVE.losses(run.predict, x0, draw.u)
            first = run.recipe.loss(draw, losses, loss_at)
            assert torch.equal(run.recipe.loss(draw, losses), first)  # of the averaged weights too, say
    run.recipe.train()
    return draws


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference"])
@pytest.mark.parametrize("spec", CHANGING)
def test_validation_leaves_no_trace(spec, how):
    run = Door(spec)
    run.step()
    before = run.noise
    draws = validate(run, how)
    assert not torch.equal(draws[0].u, draws[1].u)
    assert all(torch.equal(a.u, b.u) for a, b in zip(draws, validate(run, how), strict=True)) is False  # goes on
    run.noise = before
    run.run(6)
    assert_same(run, Door(spec).run(7))


def test_validation_does_not_depend_on_what_was_validated_before():
    runs = [Door(CHEAP).run(2) for _ in range(2)]
    validate(runs[0], "eval")
    draws = [validate(run.run(1), "no_grad") for run in runs]
    assert all(torch.equal(a.u, b.u) for a, b in zip(*draws, strict=True))


# Mistakes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", CHANGING)
def test_a_recipe_that_learns_must_be_attached(spec):
    recipe = noisewise.recipe(spec, OBJECTIVE)
    draw = recipe.sample(torch.randn(8, 2))
    with pytest.raises(RuntimeError, match=r"recipe\.attach\(optimizer\)"):
        recipe.loss(draw, torch.ones(8))


@pytest.mark.parametrize("spec", ["uniform", "logit_normal+minsnr", "speed:k=5+change_aware", "uniform+learned"])
def test_a_fixed_recipe_need_not_be_attached(spec):
    recipe = noisewise.recipe(spec, OBJECTIVE)
    draws = [recipe.sample(8) for _ in range(2)]
    assert not torch.equal(draws[0].u, draws[1].u)
    assert torch.isfinite(recipe.loss(draws[0], torch.ones(8)))


def test_a_draw_is_used_once(door):
    draw = one_batch(door)
    with pytest.raises(RuntimeError, match=r"handed over before: write draw = recipe\.sample"):
        door.recipe.weigh(draw, torch.ones(16))


def test_the_last_draw_is_at_hand_and_is_not_copied(door):
    assert door.recipe.last is None
    draw = door.recipe.sample(8)
    assert door.recipe.last is draw
    with torch.no_grad():
        assert door.recipe.sample(8) is door.recipe.last is not draw
    assert copy.deepcopy(door.recipe).last is None


def test_draws_of_others_are_refused(door):
    for other in (noisewise.recipe(CHEAP, OBJECTIVE).sample(16), door.recipe.sampler.sample(16)):
        with pytest.raises(ValueError, match="another recipe"):
            door.recipe.loss(other, torch.ones(16))
    with pytest.raises(TypeError, match="comes first"):
        door.recipe.loss(torch.ones(16), door.recipe.sample(16))


@pytest.mark.parametrize("losses", [torch.ones(()), torch.ones(3), torch.ones(16, 2), 0.5, None])
def test_losses_that_are_not_one_a_sample_can_be_handed_over_again(door, losses):
    draw = door.recipe.sample(16)
    with pytest.raises((ValueError, TypeError), match="one a sample"):
        door.recipe.loss(draw, losses)
    door.recipe.loss(draw, torch.ones(16))


def test_a_validation_draw_cannot_be_trained_on(door):
    x0, loss_at = door.batch()
    with torch.no_grad():
        draw = door.recipe.sample(x0)
    with pytest.raises(RuntimeError, match="for validation"):
        door.recipe.loss(draw, loss_at(slice(None), draw.u))


def test_losses_that_go_another_way_are_noticed_at_the_step(door):
    x0, loss_at = door.batch()
    draw = door.recipe.sample(x0)
    loss_at(slice(None), draw.u).mean().backward()
    with pytest.raises(RuntimeError, match="never handed over"):
        door.optimizer.step()
    losses = loss_at(slice(None), door.recipe.sample(x0).u)
    door.optimizer.zero_grad()
    losses.mean().backward()
    with pytest.raises(RuntimeError, match="never handed over"):
        door.optimizer.step()
    draw = door.recipe.sample(x0)
    losses = loss_at(slice(None), draw.u)
    door.recipe.loss(draw, losses)
    losses.mean().backward()
    with pytest.raises(RuntimeError, match=r"instead of losses\.mean\(\)"):
        door.optimizer.step()


def test_a_step_before_the_end_of_the_backward_pass_is_told_apart_from_a_forgotten_one(door):
    """In a hook of a gradient, as optimizers in the backward pass do, or under compiled autograd, which calls no end."""
    x0, loss_at = door.batch()
    draw = door.recipe.sample(x0)
    losses = door.recipe.loss(draw, loss_at(slice(None), draw.u))
    for one in door.optimizer.param_groups[0]["params"]:
        one.register_post_accumulate_grad_hook(lambda _: door.optimizer.step())
    with pytest.raises(RuntimeError, match="before the backward pass has told its end"):
        losses.backward()


def test_an_optimizer_that_never_steps_is_an_error(door):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(MOST):
            door.recipe.loss(door.recipe.sample(2), torch.ones(2))
        with pytest.raises(RuntimeError, match=r"Adam never stepped.*Attach the optimizer that really steps"):
            door.recipe.sample(2)


def test_observe_without_with_is_noticed_at_the_next_draw():
    sampler = noisewise.recipe(CHEAP, OBJECTIVE).sampler
    draw = sampler.sample(4)
    sampler.observe(draw, torch.ones(4))
    with pytest.raises(RuntimeError, match=r"with sampler\.observe"):
        sampler.sample(4)
    with sampler.observe(draw, torch.ones(4)):
        pass
    assert sampler.sample(4).u.shape == (4,)


def test_a_learned_weighting_that_is_not_trained_is_noticed_once():
    run = Door("adaptive+learned")
    run.optimizer = torch.optim.Adam(run.model.parameters(), lr=1e-2)
    run.recipe.attach(run.optimizer)
    with pytest.warns(RuntimeWarning, match=r"\*recipe\.parameters\(\)"):
        run.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.step()
        Door("adaptive+learned").step()


@pytest.mark.parametrize("given", [torch.ones(16), 0.5])
def test_a_factor_is_not_taken_for_loss_at(door, given):
    x0, loss_at = door.batch()
    draw = door.recipe.sample(x0)
    losses = loss_at(slice(None), draw.u)
    with pytest.raises(TypeError, match=r"loss_at must be a function of \(rows, u\), got .*recipe\.weigh"):
        door.recipe.loss(draw, losses, given)
    door.recipe.loss(draw, losses).backward()


def test_a_recipe_is_made_of_parts():
    with pytest.raises(TypeError, match=r"takes a Sampler, got 'adaptive'; noisewise\.recipe\(spec, objective\)"):
        Recipe("adaptive", None, OBJECTIVE)
    with pytest.raises(TypeError, match=r"weighting must be a Weighting.*build_weighting"):
        Recipe(Uniform(OBJECTIVE.process), "minsnr", OBJECTIVE)


def test_what_cannot_be_heard_is_refused(door):
    class Engine:
        """As DeepSpeed's: its optimizer is none of torch's."""

        def step(self):
            pass

    engine = Engine()
    engine.optimizer = Engine()
    for given in (engine, None):
        with pytest.raises(TypeError, match=rf"{type(given).__name__} has no step hooks"):
            door.recipe.attach(given)
    with pytest.raises(TypeError, match=r"recipe\.attach\(optimizer, model\)"):
        door.recipe.attach(door.model, door.optimizer)
    door.step()  # the old one is still attached
    assert door.recipe.sampler.step == 1


@pytest.mark.parametrize("name", ["gradient_variance:every=1", "adaptive:estimator=lookahead,warmup=0"])
def test_samplers_that_look_into_the_model_say_so_at_once(name):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"recipe\.attach\(optimizer, model\)"):
        noisewise.recipe(name, OBJECTIVE).attach(optimizer)
    with pytest.raises(TypeError, match=r"must be an nn\.Module, got function.*recipe\.attach\(optimizer, model\)"):
        noisewise.recipe(name, OBJECTIVE).attach(optimizer, lambda x, time: x)


@pytest.mark.parametrize("name", ["gradient_variance", "adaptive:estimator=lookahead", "adaptive:estimator=reinforce"])
def test_samplers_that_probe_the_model_want_loss_at_with_the_first_losses(name):
    run = Door(name)
    x0, loss_at = run.batch()
    draw = run.recipe.sample(x0)
    losses = loss_at(slice(None), draw.u)
    with pytest.raises(TypeError, match=r"recipe\.loss\(draw, losses, loss_at\)"):
        run.recipe.loss(draw, losses)
    run.recipe.loss(draw, losses, loss_at).backward()


# State ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fill(tmp_path):
    import numpy as np

    np.save(tmp_path / "table.npy", np.linspace(0.2, 2.0, 50))
    return lambda spec: spec.replace("{table}", str(tmp_path / "table.npy"))


@pytest.mark.parametrize("spec", [*ALL_SPECS, "adaptive:warmup=2,every=2+learned"])
def test_a_recipe_goes_on_from_its_state_bit_for_bit(spec, fill, tmp_path):
    whole, first, second = (Door(fill(spec)) for _ in range(3))
    whole.run(8)
    first.run(4)
    kept = {"recipe": first.recipe.state_dict(), "optimizer": first.optimizer.state_dict(), "model": first.inner.state_dict()}
    torch.save(kept, tmp_path / "kept.pt")
    kept = torch.load(tmp_path / "kept.pt", weights_only=True)
    second.recipe.load_state_dict(kept["recipe"])
    second.optimizer.load_state_dict(kept["optimizer"])
    second.inner.load_state_dict(kept["model"])
    second.data.set_state(first.data.get_state())
    second.noise, second.steps, second.draws = first.noise, first.steps, first.draws
    assert_same(second.run(4), whole)


def state_of(recipe):
    return {name: value.clone() for name, value in recipe.state_dict().items()}


OTHERS = ["loss_moment", "adaptive:strata=7", "adaptive:estimator=reinforce,policy=global,every=1", "adaptive+learned"]


@pytest.mark.parametrize("spec", OTHERS)
@pytest.mark.parametrize("other", [*OTHERS, "nothing"])
def test_the_state_of_another_recipe(spec, other):
    if spec == other:
        pytest.skip("the same")
    recipe = noisewise.recipe(spec, OBJECTIVE)
    state = {} if other == "nothing" else noisewise.recipe(other, OBJECTIVE).state_dict()
    before, named = state_of(recipe), "holds no recipe" if other == "nothing" else "of the recipe"
    with pytest.raises(RuntimeError, match=named) as error:
        recipe.load_state_dict(state)
    assert repr(spec) in str(error.value)
    assert other == "nothing" or repr(other) in str(error.value)
    with pytest.warns(RuntimeWarning, match="starts anew"):
        recipe.load_state_dict(state, strict=False)
    after = recipe.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_state_is_the_same_whatever_the_default_device():
    recipe = noisewise.recipe("adaptive", DDPM.linear())
    recipe.sample(4)
    before = state_of(recipe)
    with torch.device("meta"):
        after = recipe.state_dict()
        recipe.load_state_dict(after)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_what_is_no_state_is_named():
    with pytest.raises(TypeError, match="got NoneType"):
        noisewise.recipe("uniform", DDPM.linear()).load_state_dict(None)


def test_the_state_of_the_same_spec_for_another_process_says_what_differs():
    state = noisewise.recipe("adaptive", DDPM.linear()).state_dict()
    with pytest.raises(RuntimeError, match=r"another 'adaptive'.*table\.edges"):
        noisewise.recipe("adaptive", DDPM.linear(10)).load_state_dict(state)


def test_other_settings_go_on_with_what_was_learned():
    old, new = Door("adaptive:warmup=2,every=2").run(6).recipe, noisewise.recipe("adaptive:floor=0.1+minsnr", OBJECTIVE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new.load_state_dict(old.state_dict())
    assert new.sampler.step == 6


class Whole(nn.Module):
    """A model that holds its recipe, as a LightningModule does."""

    def __init__(self, spec=None):
        super().__init__()
        self.network = nn.Linear(2, 2)
        if spec is not None:
            self.recipe = noisewise.recipe(spec, OBJECTIVE)


def test_a_recipe_inside_a_model_is_saved_with_it():
    old, new = Whole("adaptive+learned"), Whole("adaptive+learned")
    old.recipe.attach(torch.optim.SGD(old.parameters(), lr=0.1))
    old.recipe.sampler.step = 5
    new.load_state_dict(old.state_dict())
    assert new.recipe.sampler.step == 5
    with pytest.warns(RuntimeWarning, match="holds no recipe"), pytest.raises(RuntimeError, match="Missing key"):
        new.load_state_dict(Whole().state_dict())
    with pytest.warns(RuntimeWarning, match="holds no recipe.*starts anew"):
        new.load_state_dict(Whole().state_dict(), strict=False)
    with pytest.warns(RuntimeWarning, match="'loss_moment'"), pytest.raises(RuntimeError, match="Missing key"):
        new.load_state_dict(Whole("loss_moment").state_dict())
    with pytest.warns(RuntimeWarning, match="'loss_moment', but this one is 'adaptive.learned': it starts anew"):
        new.load_state_dict(Whole("loss_moment").state_dict(), strict=False)


def test_loading_forgets_what_was_handed_over(door):
    one_batch(door)
    draw = door.recipe.sample(16)
    door.recipe.load_state_dict(door.recipe.state_dict())
    with pytest.raises(ValueError, match="another recipe"):
        door.recipe.loss(draw, torch.ones(16))
    door.optimizer.step()
    assert door.recipe.sampler.step == 0


# Modules ----------------------------------------------------------------------------------------------------------------


def test_parameters_are_those_of_a_learned_weighting():
    for spec in ("adaptive:estimator=reinforce,every=1,strata=4", "minsnr"):
        run = Door(spec)
        run.step()
        assert list(run.recipe.parameters()) == []
        assert [one for one in nn.ModuleList([run.recipe]).parameters() if one.requires_grad] == []
    names = [name for name, _ in noisewise.recipe("adaptive+minsnr+learned", OBJECTIVE).named_parameters()]
    assert names == ["weighting.factors.1.coefficients"]


def test_half_precision_leaves_the_numbers_as_they_are():
    for make in (lambda recipe: recipe.half(), lambda recipe: nn.ModuleList([recipe]).to(torch.bfloat16)):
        recipe = noisewise.recipe("adaptive+learned", OBJECTIVE)
        make(recipe)
        assert {value.dtype for value in recipe.state_dict().values() if value.is_floating_point()} <= {
            torch.float32,
            torch.float64,
        }


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda recipe: pickle.loads(pickle.dumps(recipe))])
def test_a_copy_is_not_attached_and_has_learned_the_same(door, copied):
    door.run(4)
    one_batch(door)
    other = copied(door.recipe)
    assert all(torch.equal(value, door.recipe.state_dict()[name]) for name, value in other.state_dict().items())
    with pytest.raises(RuntimeError, match=r"recipe\.attach"):
        other.loss(other.sample(4), torch.ones(4))
    door.optimizer.step()
    assert (door.recipe.sampler.step, other.sampler.step) == (5, 4)


def test_repr_says_what_a_recipe_does(door):
    door.run(3)
    text = repr(door.recipe)
    for part in ("adaptive:warmup=2", "DDPM", "minsnr:gamma=5", "0.35", "2 steps", "importance", "Adam"):
        assert part in text, part
    assert "step      3" in text
    fixed = repr(noisewise.recipe("logit_normal+minsnr:gamma=3+p2", OBJECTIVE))
    assert "minsnr:gamma=3+p2" in fixed
    assert "floor" not in fixed


def test_a_sampler_of_ones_own_makes_a_recipe():
    recipe = Recipe(Uniform(DDPM.linear()))
    assert recipe.objective.prediction == "eps"
    assert "Uniform" in repr(recipe)
    assert torch.equal(recipe.loss(recipe.sample(4), torch.ones(4)), torch.tensor(1.0))


@pytest.mark.slow
def test_two_ranks(tmp_path):
    """Hooks are `observe` bit for bit on both, both hold the same, and a learned weighting is averaged over them."""
    first, second = fork_ranks(main, tmp_path)
    assert first["runs"].keys() == second["runs"].keys()
    for name, runs in first["runs"].items():
        for one in (runs, second["runs"][name]):
            assert one["door"] == one["observed"], name
        assert runs["shared"] == second["runs"][name]["shared"], name
        assert runs["door"] != second["runs"][name]["door"], name  # other draws
    assert first["learned"] == second["learned"]
    assert first["learned"]["before"] != first["learned"]["after"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("spec", ["uniform", "logit_normal+minsnr", "adaptive", "adaptive+p2", "loss_moment"])
def test_no_host_synchronisation_between_updates(spec, accumulate):
    recipe, model = noisewise.recipe(spec, OBJECTIVE), nn.Linear(1, 1).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    recipe.attach(optimizer)
    x0 = torch.randn(64, 3, 8, 8, device="cuda")

    def step():
        for _ in range(accumulate):
            draw = recipe.sample(x0)
            recipe.loss(draw, model(draw.u[:, None]).squeeze(1) ** 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):  # place tables
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# compiled loops ----------------------------------------------------------------------------------------------------------


def steps_of(spec, whole, compiler=lambda step: step):
    """Draws and losses of 24 steps, of which all or all but the update is one function."""
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    recipe, optimizer = noisewise.recipe(spec, OBJECTIVE), torch.optim.SGD(net.parameters(), lr=1e-2)
    recipe.attach(optimizer)

    def step(x0, noise):
        draw = recipe.sample(x0)
        x = draw.alpha * x0 + draw.sigma * noise
        losses = (net(torch.cat([x, draw.time[:, None] / 1000], 1)) - noise).square().mean(1)
        loss = recipe.loss(draw, losses)
        if whole:
            update(loss)
        return loss, draw.u

    def update(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step, found = compiler(step), []
    for number in range(24):
        x0, noise = torch.randn(2, 16, 2, generator=torch.Generator().manual_seed(number))
        loss, u = step(x0, noise)
        if not whole:
            update(loss)
        found.append((loss.detach(), u))
    return found, recipe


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("spec", ["uniform", "adaptive:warmup=0,every=2", "window:of=(adaptive:warmup=0,every=2),high=0.9+p2"])
def test_a_compiled_step_is_compiled_once_and_trains_alike(spec, whole):
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    expected, eager = steps_of(spec, whole)
    with torch._dynamo.config.patch(error_on_recompile=True):
        found, compiled = steps_of(spec, whole, lambda step: torch.compile(step, backend=counting))
    torch._dynamo.reset()
    assert 1 <= len(graphs) <= 8  # parts between what is left out, whatever the number of steps
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    for name, value in eager.state_dict().items():
        assert torch.equal(compiled.state_dict()[name], value), name
