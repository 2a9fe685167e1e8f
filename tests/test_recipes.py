"""The front door: hooks against `observe` bit for bit, what a step closes, mistakes, state, and what a recipe shows."""

import pytest
import torch

from tests.loops import WHERE, Door, Observed, assert_same
from tests.samplers.specs import LEARNERS, SPECS

CHANGING = [*LEARNERS, *SPECS["curriculum"], "adaptive:warmup=2,every=2+learned"]
CHEAP = "adaptive:warmup=2,every=2,strata=10"


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("spec", CHANGING)
def test_hooks_are_observe_bit_for_bit(spec, accumulate):
    door = Door(spec, accumulate=accumulate).run(12)
    assert door.recipe.sampler.step == 12
    assert_same(door, Observed(spec, accumulate=accumulate).run(12))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("spec", CHANGING)
def test_steps_that_a_scaler_skips_teach_nothing(spec, accumulate):
    bad = {0, 4, 5, 9}
    door = Door(spec, accumulate=accumulate, bad=bad).run(12)
    assert door.recipe.sampler.step == 12 - len(bad)
    assert_same(door, Observed(spec, accumulate=accumulate, bad=bad).run(12))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zero", WHERE)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_wherever_gradients_are_zeroed_skipped_draws_are_forgotten(zero, accumulate, set_to_none):
    settings = {"accumulate": accumulate, "bad": {1, 4, 5}, "zero": zero, "set_to_none": set_to_none}
    assert_same(Door(CHEAP, **settings).run(8), Observed(CHEAP, **settings).run(8))
