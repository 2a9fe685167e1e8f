"""Two real processes: the same state on both after every step, other draws, unequal batches, strata split between them."""

import numpy as np
import pytest
import torch

from noisewise import DDPM
from tests.samplers.specs import ALL_SPECS
from tests.samplers.toy import Toy
from tests.torchrun import fork_ranks
from tests.workers.contracts import main


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    np.save(out / "table.npy", np.linspace(0.2, 2.0, 50))
    results = fork_ranks(main, out, str(out / "table.npy"))
    results.append(out)
    for result in results[:2]:
        for batches in ("equal", "unequal"):
            assert len(result[batches]) == len(ALL_SPECS)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("batches", ["equal", "unequal"])
def test_ranks_hold_the_same_state_and_draw_differently(ranks, batches):
    for spec, first in ranks[0][batches].items():
        second = ranks[1][batches][spec]
        assert [row["state"] for row in first] == [row["state"] for row in second], spec
        assert all(a["draw"] != b["draw"] for a, b in zip(first[:-1], second[:-1], strict=True)), spec


@pytest.mark.slow
def test_a_run_of_two_ranks_goes_on_with_one(ranks):
    for number, spec in enumerate(ALL_SPECS):
        toy = Toy(spec.replace("{table}", str(ranks[2] / "table.npy")), DDPM.linear())
        toy.sampler.load_state_dict(torch.load(ranks[2] / f"state{number}.pt", weights_only=True))
        assert toy.sampler.step == 10
        toy.run(6)
        assert toy.sampler.step == 16
        assert torch.isfinite(toy.sampler.sample(64).weight).all()


@pytest.mark.slow
def test_strata_are_split_over_ranks(ranks):
    for mine, theirs in zip(ranks[0]["stratified"], ranks[1]["stratified"], strict=True):
        together = torch.tensor(mine + theirs)
        assert torch.equal((together * 64).long().sort().values, torch.arange(64))


@pytest.mark.slow
def test_gamma_goes_to_the_same_place_with_other_data(ranks):
    assert ranks[0]["gamma"] == ranks[1]["gamma"]
    assert all(gamma > 5 for gamma, _ in ranks[0]["gamma"])


@pytest.mark.slow
def test_gradients_of_all_ranks_count_without_ddp(ranks):
    """As through Lightning, whose callback attaches the bare module."""
    assert ranks[0]["gradients"] == ranks[1]["gradients"]
    alike, first, second = (torch.tensor(variances) for variances in ranks[0]["gradients"])
    for larger in (first, second):
        assert bool((larger > 10 * alike).all())


@pytest.mark.slow
def test_fsdp2(ranks):
    """Sharded parameters and optimizer state: probing, look-ahead trials and gradient norms work, and ranks agree."""
    first, second = (result["sharded"] for result in ranks[:2])
    assert first == second
    assert all(len(result["states"]) == 8 and not result["uniform"] for result in first.values())
