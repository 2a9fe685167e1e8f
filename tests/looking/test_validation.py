"""Validation against a computation by hand; the same whatever the batches, the ranks and the random state; never in the way."""

import warnings
from collections import namedtuple
from functools import partial, wraps

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from noisewise import DDPM, EDM, AdaptiveSampler, Flow, Objective
from noisewise.batches import moved
from noisewise.looking.validation import NOISE_SEED, Validation, validate
from noisewise.streams import normals
from noisewise.weighting import MinSNR
from tests.torchrun import fork_ranks

OBJECTIVE = Objective(DDPM.linear())
OBJECTIVES = [OBJECTIVE, Objective(EDM(), "edm"), Objective(Flow(), "flow", "huber")]


class Network(nn.Module):
    """Takes labels if there are any; has statistics and dropout, which validation must leave alone."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Dropout(0.5)
        self.last, self.classes = nn.Linear(16, 3), nn.Embedding(5, 16)

    def forward(self, x, time, label=None):
        hidden = self.norm(self.first(x)) + time.float()[:, None] * 1e-3
        return self.last(self.drop(torch.relu(hidden if label is None else hidden + self.classes(label))))


def network():
    torch.manual_seed(0)
    return Network()


def data(count):
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(1))


def batches(sizes):
    return list(data(sum(sizes)).split(sizes))


def scale(x, time):
    return 0.3 * x + time.float().view(-1, *[1] * (x.ndim - 1)) * 1e-4


def by_scale(batch, u, noise):
    return OBJECTIVE.losses(scale, batch, u, noise)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.prediction)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_equals_a_loop_over_samples_and_levels(objective, shape):
    x0 = torch.randn(7, *shape, generator=torch.Generator().manual_seed(2))
    found = validate(lambda x, u, noise: objective.losses(scale, x, u, noise), x0.split(3), objective, levels=5, seed=4)
    each = torch.zeros(7, 5, dtype=torch.float64)
    for i in range(7):
        for level in range(5):
            noise = normals(4 ^ NOISE_SEED, torch.tensor([i]), level, shape)
            each[i, level] = objective.losses(scale, x0[i : i + 1], torch.tensor([(level + 0.5) / 5]), noise).double()
    torch.testing.assert_close(found.loss, each.mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.error, each.std(0) / 7**0.5, rtol=1e-4, atol=1e-9)
    assert found.samples == 7
    assert found.mean == pytest.approx(float(each.mean()), rel=1e-6)
    middles = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])
    torch.testing.assert_close(found.u, middles.double())
    assert torch.equal(found.time, objective.process.time(middles))
    assert torch.equal(found.log_snr, objective.process.log_snr(middles))


@pytest.mark.parametrize("per_sample", [None, 3])
def test_neither_the_batches_nor_the_random_state_matter(per_sample):
    found = []
    for seed, sizes in enumerate(([24], [7, 7, 7, 3], [1] * 24)):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        found.append(validate(by_scale, batches(sizes), OBJECTIVE, levels=6, per_sample=per_sample))
        assert torch.equal(torch.get_rng_state(), state)
    for other in found[1:]:
        torch.testing.assert_close(other.loss, found[0].loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(other.error, found[0].error, rtol=1e-9, atol=0)
    again = validate(by_scale, batches([24]), OBJECTIVE, levels=6, per_sample=per_sample)
    assert torch.equal(again.loss, found[0].loss)
    assert not torch.equal(
        validate(by_scale, batches([24]), OBJECTIVE, levels=6, per_sample=per_sample, seed=1).loss, again.loss
    )


def test_a_few_levels_a_sample_are_some_of_all_and_balanced():
    seen = []

    def keeping(batch, u, noise):
        seen.extend(zip(batch[:, 0].tolist(), u.tolist(), noise[:, 0].tolist(), strict=True))
        return u

    x0 = torch.arange(40.0)[:, None].expand(40, 3)
    validate(keeping, x0.split(9), OBJECTIVE, levels=10)
    everything = set(seen)
    assert len(everything) == 400
    seen.clear()
    found = validate(keeping, x0.split(9), OBJECTIVE, levels=10, per_sample=2)
    assert len(set(seen)) == len(seen) == 80
    assert set(seen) <= everything  # the same noise for the same sample and level
    levels = torch.tensor([u for _, u, _ in seen])
    assert torch.equal(levels.unique(return_counts=True)[1], torch.full((10,), 8))
    torch.testing.assert_close(found.loss, found.u, rtol=1e-6, atol=0)
    assert found.samples == 40
    mine = {i: sorted(u for number, u, _ in seen if number == i) for i in range(40)}
    assert all(high - low == pytest.approx(0.5) for low, high in mine.values())
    # every tenth sample may be of one class: it must not always meet the same levels
    assert len({tuple(mine[i]) for i in range(0, 40, 10)}) > 1


def test_the_fewest_samples_for_every_level():
    assert validate(by_scale, batches([5]), OBJECTIVE, levels=50, per_sample=10).samples == 5
    with pytest.raises(ValueError, match="10 of 50 levels got no sample: give at least 5 samples"):
        validate(by_scale, batches([4]), OBJECTIVE, levels=50, per_sample=10)


def test_a_module_is_called_with_the_rest_of_the_batch_in_evaluation_mode():
    model, x0, labels = network(), data(8), torch.arange(8) % 5
    model.norm.eval()  # frozen by its owner, and to stay so
    modes = [part.training for part in model.modules()]
    before = [value.clone() for value in model.state_dict().values()]
    found = validate(model, DataLoader(TensorDataset(x0, labels), 3), OBJECTIVE, levels=4)
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    model.eval()
    with torch.no_grad():
        for level in range(4):
            noise = normals(NOISE_SEED, torch.arange(8), level, (3,))
            losses = OBJECTIVE.losses(model, x0, torch.full((8,), (level + 0.5) / 4), noise, labels)
            assert float(found.loss[level]) == pytest.approx(float(losses.double().mean()), rel=1e-6)


def test_a_function_takes_any_batch_and_its_model_is_put_into_evaluation_mode():
    model, x0 = network(), data(6)
    given = [{"pictures": x0[i : i + 2], "text": {"label": torch.tensor([1, 2]), "prompt": ["a", "b"]}} for i in (0, 2, 4)]

    def losses_at(batch, u, noise):
        assert not model.training
        assert not torch.is_grad_enabled()
        return OBJECTIVE.losses(model, batch["pictures"], u, noise, label=batch["text"]["label"])

    found = validate(losses_at, given, OBJECTIVE, model=model, x0="pictures", levels=3, device="cpu")
    assert model.training
    labels = torch.tensor([1, 2] * 3)
    assert found.mean == pytest.approx(validate(model, [(x0, labels)], OBJECTIVE, levels=3).mean, rel=1e-6)
    looked_up = validate(losses_at, given, OBJECTIVE, model=model, x0=lambda batch: batch["pictures"], levels=3)
    assert looked_up.mean == found.mean


def test_modes_are_put_back_after_an_error():
    model = network()
    with pytest.raises(RuntimeError):
        validate(model, [torch.zeros(2, 4)], OBJECTIVE)
    assert all(part.training for part in model.modules())


def test_low_precision_data_gets_noise_of_its_type():
    seen = set()

    def losses_at(batch, u, noise):
        seen.update([noise.dtype, u.dtype])
        return noise.float().square().mean(1)

    validate(losses_at, [data(4).bfloat16()], OBJECTIVE, levels=2)
    assert seen == {torch.bfloat16, torch.float32}


def train(validating):
    model = network()
    sampler, optimizer = AdaptiveSampler(OBJECTIVE.process), torch.optim.Adam(model.parameters(), 1e-2)
    held_out = DataLoader(TensorDataset(data(10)), 4, shuffle=True)  # draws from the global random state when it begins
    for step, (x0,) in enumerate(DataLoader(TensorDataset(data(48)), 8, shuffle=True)):
        draw = sampler.sample(x0)
        losses = OBJECTIVE.losses(model, x0, draw.u)
        (draw.weight * losses).mean().backward()
        if validating and step % 2:
            validate(model, held_out, OBJECTIVE, levels=5)
        with sampler.observe(draw, losses.detach()):
            optimizer.step()
        optimizer.zero_grad()
    return [*model.state_dict().values(), *sampler.state_dict().values(), torch.get_rng_state()]


@pytest.mark.filterwarnings("ignore:this loader shuffles")
def test_training_goes_on_bit_for_bit_as_if_nothing_had_been_validated():
    assert all(torch.equal(a, b) for a, b in zip(train(False), train(True), strict=True))


# What is made of the numbers


def known(losses):
    count = len(losses)
    u = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return Validation(u, torch.tensor(losses, dtype=torch.float64), torch.zeros(count), 3, OBJECTIVE)


def test_quartiles_are_means_over_quarters_of_u():
    assert known([1.0, 3.0, 5.0, 7.0, 2.0, 2.0, 0.0, 8.0]).quartiles == pytest.approx([2, 6, 2, 4])
    # of six levels one and a half lie in each quarter
    assert known([3.0, 6.0, 0.0, 9.0, 3.0, 0.0]).quartiles == pytest.approx([4, 2, 7, 1])
    assert known([2.0]).quartiles == pytest.approx([2, 2, 2, 2])
    nan = known([float("nan"), 1.0, 1.0, 1.0]).quartiles
    assert nan[0] != nan[0]
    assert nan[1:] == pytest.approx([1, 1, 1])


def test_the_weighted_mean_weights():
    found = validate(by_scale, batches([6]), OBJECTIVE, levels=8)
    weights = MinSNR(5.0).weights(OBJECTIVE, found.u.float()).double()
    assert found.weighted(MinSNR(5.0)) == pytest.approx(float((weights * found.loss).mean()), rel=1e-12)
    assert found.weighted(MinSNR(5.0)) != pytest.approx(found.mean, rel=1e-2)
    other = Objective(OBJECTIVE.process, "v")
    assert found.weighted(MinSNR(5.0), other) != pytest.approx(found.weighted(MinSNR(5.0)), rel=1e-2)


def test_rows_and_lines():
    found = known([1.0, 2.0, 3.0, 4.0])
    expected = {"loss": 2.5, "loss_q0": 1.0, "loss_q1": 2.0, "loss_q2": 3.0, "loss_q3": 4.0}
    assert found.row("") == pytest.approx(expected)
    by_level = {f"eval/loss_by_level/{i}": i + 1.0 for i in range(4)}
    assert found.row("eval/", levels=True) == pytest.approx({f"eval/{k}": v for k, v in expected.items()} | by_level)
    lines = found.lines(2)
    assert [line.split() for line in lines] == [
        ["t", "loss"],
        ["0", "to", "500", "1.50000"],
        ["500", "to", "999", "3.50000"],
        ["mean", "2.50000"],
    ]
    assert len(found.lines()) == 6


# Mistakes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"levels": 0}, "levels must be >= 1, got 0"),
        ({"per_sample": 0}, "per_sample must lie between 1 and levels=50, got 0"),
        ({"per_sample": 51}, "per_sample must lie between 1 and levels=50, got 51"),
        ({"x0": 0}, "x0=0: a batch that is a tensor is x0 itself; leave x0= out"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        validate(by_scale, batches([2]), OBJECTIVE, **settings)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([], ValueError, "no batches: is the loader empty, or a generator that has been used up"),
        ([{"a": torch.zeros(2, 3)}], TypeError, "got dict: say where x0 is with x0=KEY among 'a'"),
        ([torch.zeros(2, 3, dtype=torch.uint8)], TypeError, "scale images to"),
        ([torch.zeros(0, 3)], ValueError, "at least one sample, got shape"),
        ([torch.zeros(3, 0)], ValueError, "at least one sample, got shape"),
    ],
)
def test_batches_without_data_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        validate(by_scale, given, OBJECTIVE)


def test_losses_must_be_one_a_sample():
    with pytest.raises(ValueError, match=r"one a sample, \(2,\), got \(\): this is the mean over the batch"):
        validate(lambda batch, u, noise: u.mean(), batches([2]), OBJECTIVE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((network(), torch.randn(8, 2), OBJECTIVE), r"x0\.split\(64\)"),
        ((network(), [torch.randn(8, 2)], OBJECTIVE.process), "must be an Objective, .* got DDPM"),
        (([torch.randn(8, 2)], network(), OBJECTIVE), "must come first, got list"),
        (
            (lambda x, time: x, [torch.randn(8, 2)], OBJECTIVE),
            r"called as losses_at\(batch, u, noise\).* objective\.losses\(model, ",
        ),
    ],
    ids=["one tensor", "a process", "the wrong way round", "a model that is a function"],
)
def test_arguments_of_the_wrong_kind_name_the_fix(arguments, message):
    with pytest.raises(TypeError, match=message):
        validate(*arguments)


def test_functions_of_any_make_that_take_a_batch_a_level_and_noise_are_called():
    class Losses:
        def __call__(self, batch, u, noise, scale=2.0):
            return u * scale

    expected = validate(Losses(), batches([2]), OBJECTIVE, levels=4)
    for function in (lambda *given: given[1] * 2.0, partial(Losses(), scale=2.0), lambda batch, u, noise=None: u * 2.0):
        assert torch.equal(validate(function, batches([2]), OBJECTIVE, levels=4).loss, expected.loss)


def test_a_loader_that_shuffles_is_warned_of():
    with pytest.warns(RuntimeWarning, match="shuffle=False") as said:
        validate(network(), DataLoader(data(8), batch_size=4, shuffle=True), OBJECTIVE, levels=2)
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validate(network(), DataLoader(data(8), batch_size=4), OBJECTIVE, levels=2)


def test_a_wrong_key_is_told_the_right_ones():
    with pytest.raises(ValueError, match="x0='picture': there is no such item in a batch; its keys are 'pictures', 'text'"):
        validate(by_scale, [{"pictures": data(2), "text": ["a", "b"]}], OBJECTIVE, x0="picture")


def test_a_module_cannot_guess_what_to_take_from_a_dict():
    with pytest.raises(TypeError, match="hand over a function"):
        validate(network(), [{"a": torch.zeros(2, 3)}], OBJECTIVE, x0="a")


def test_a_loss_that_is_no_number_shows_at_its_level_alone():
    def losses_at(batch, u, noise):
        return torch.where(u < 0.25, torch.nan, u)

    for per_sample in (None, 2):
        found = validate(losses_at, batches([8]), OBJECTIVE, levels=4, per_sample=per_sample)
        assert torch.isnan(found.loss).tolist() == [True, False, False, False]


def test_data_that_are_no_numbers_make_the_loss_none_too():
    x0 = torch.full((4, 3), torch.nan)
    assert bool(torch.isnan(validate(network(), [x0], OBJECTIVE, levels=2).loss).all())


def test_a_number_of_levels_may_be_numpys():
    assert validate(by_scale, batches([2]), OBJECTIVE, levels=np.int64(3)).even


def test_batches_are_moved_whatever_they_are_made_of():
    Pair = namedtuple("Pair", ["x", "y"])
    one = torch.zeros(2)
    there = moved({"a": [one, (one, "text")], "b": Pair(one, 3)}, "meta")
    assert there["a"][0].is_meta
    assert there["a"][1][0].is_meta
    assert there["a"][1][1] == "text"
    assert isinstance(there["b"], Pair)
    assert there["b"].x.is_meta
    assert there["b"].y == 3


# Levels by name


def test_the_levels_of_mlperf():
    """Eight of equal distance from no noise on, and the mean over them."""
    flow = Objective(Flow())
    found = validate(lambda batch, u, noise: u + batch[:, 0], batches([4, 4]), flow, levels="mlperf")
    assert found.u.tolist() == found.time.tolist() == [k / 8 for k in range(8)]
    torch.testing.assert_close(found.loss, found.u + data(8)[:, 0].double().mean(), atol=1e-6, rtol=0)
    assert found.mean == pytest.approx(7 / 16 + float(data(8)[:, 0].mean()), abs=1e-6)
    row = found.row("v/")
    assert list(row)[:3] == ["v/loss", "v/loss_t0", "v/loss_t0.125"]
    assert row["v/loss_t0.5"] == pytest.approx(float(found.loss[4]))
    assert found.quartiles == pytest.approx(found.loss.view(4, 2).mean(1).tolist())
    assert [line.split()[0] for line in found.lines()] == ["t", *(f"{k / 8:.4g}" for k in range(8)), "mean"]
    steps = validate(by_scale, batches([4, 4]), OBJECTIVE, levels="mlperf", per_sample=1)
    assert steps.time.tolist() == [125 * k for k in range(8)]


def test_even_levels_by_any_name_are_the_same():
    one, other = (validate(by_scale, batches([4, 4]), OBJECTIVE, levels=levels) for levels in (6, "quantiles(6)"))
    assert torch.equal(one.loss, other.loss)
    assert one.row(levels=True) == other.row(levels=True)
    given = validate(by_scale, batches([4, 4]), OBJECTIVE, levels=one.u)
    assert torch.equal(one.loss, given.loss)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.prediction)
def test_a_grid_of_log_snr(objective):
    found = validate(lambda batch, u, noise: u, batches([2]), objective, levels="log_snr(9)")
    gaps = found.log_snr.double().diff()
    assert len(found.u) == 9
    assert float(gaps.max()) < 0
    assert float(gaps.std() / gaps.mean().abs()) < 0.05


class Half:
    """An optimum of half the level, in the units of any objective."""

    def at(self, u, objective=None):
        return u / 2


def test_levels_may_be_given_and_have_what_is_reducible_beside():
    found = validate(lambda batch, u, noise: u, batches([3]), OBJECTIVE, levels=[0.1, 0.5, 0.9], optimal=Half())
    torch.testing.assert_close(found.reducible, found.u / 2, atol=1e-6, rtol=0)
    assert found.row()["validation/reducible_t500"] == pytest.approx(0.25)
    assert found.lines()[0].split() == ["t", "loss", "optimal", "reducible"]
    assert torch.isnan(torch.tensor(found.parts(10))).sum() == 7


@pytest.mark.parametrize(
    ("objective", "levels", "message"),
    [
        (OBJECTIVE, "mlperf8", "unknown levels"),
        (OBJECTIVE, "log_snr", "unknown levels"),
        (OBJECTIVE, "quantiles(0)", "levels must be >= 1"),
        (OBJECTIVE, [], "rising numbers u"),
        (OBJECTIVE, [0.5, 0.2], "rising numbers u"),
        (OBJECTIVE, [0.5, torch.nan], "rising numbers u"),
        (OBJECTIVE, ["a"], "rising numbers u"),
        (OBJECTIVE, None, "rising numbers u"),
        (OBJECTIVE, [125, 500], "u_of_time"),
        (Objective(DDPM.linear(5)), "log_snr(20)", "different levels"),
    ],
)
def test_unknown_levels_are_one_clear_line(objective, levels, message):
    with pytest.raises(ValueError, match=message) as raised:
        validate(lambda batch, u, noise: u, batches([2]), objective, levels=levels)
    assert "\n" not in str(raised.value)


# Two processes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    from tests.workers.validate import main  # which takes its problem from here

    return fork_ranks(main, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [("even", [4, 4, 4, 4]), ("odd", [5, 3, 4]), ("one", [7])], ids=lambda sizes: sizes[0])
@pytest.mark.parametrize("per_sample", [None, 3])
def test_two_processes_find_what_one_does_bit_for_bit(ranks, sizes, per_sample):
    name, each = sizes
    one = validate(network(), batches(each), OBJECTIVE, levels=6, per_sample=per_sample)
    for rank in ranks:
        assert rank["found"][f"{name}-{per_sample}"] == [one.loss.tolist(), one.error.tolist(), sum(each)]
        assert rank["training"]


@pytest.mark.slow
@pytest.mark.parametrize("per_sample", [None, 1])
def test_two_processes_agree_on_mlperfs_levels_with_one(ranks, per_sample):
    one = validate(network(), batches([5, 3, 4]), OBJECTIVE, levels="mlperf", per_sample=per_sample)
    for rank in ranks:
        assert rank["found"][f"mlperf-{per_sample}"] == [one.loss.tolist(), one.error.tolist(), 12]


@pytest.mark.slow
def test_what_goes_wrong_on_one_process_ends_both(ranks):
    for rank in ranks:
        assert "the processes were handed different batches: give all of them the same loader" in rank["errors"]["sharded"]
        assert "there are no batches" in rank["errors"]["missing"]
    assert "another process has failed" in ranks[0]["errors"]["one fails"]
    assert "on purpose" in ranks[1]["errors"]["one fails"]


def test_a_function_is_judged_by_what_it_takes_itself():
    """Not by what it wraps, nor by nonsense that it says of itself."""
    objective = Objective(DDPM.linear(), "eps")

    def of_two(x, time):
        return x

    @wraps(of_two)
    def of_three(batch, u, noise):
        return objective.losses(of_two, batch, u, noise)

    class Odd:
        __signature__ = 3

        def __call__(self, batch, u, noise):
            return objective.losses(of_two, batch, u, noise)

    batches = [torch.zeros(4, 3)]
    expected = validate(of_three, batches, objective).mean
    assert validate(Odd(), batches, objective).mean == expected


def test_what_is_reducible_is_the_loss_less_the_optimum():
    plain = validate(by_scale, batches([4, 4]), OBJECTIVE, levels=5)
    with pytest.raises(ValueError, match="optimal loss is not known"):
        _ = plain.reducible
    with pytest.raises(TypeError, match="optimal must be what optimal_loss"):
        validate(by_scale, batches([4, 4]), OBJECTIVE, levels=5, optimal=0.5)
    found = validate(by_scale, batches([4, 4]), OBJECTIVE, levels=5, optimal=Half())
    assert torch.equal(found.loss, plain.loss)
    assert torch.equal(found.reducible, plain.loss - plain.u / 2)
    row = found.row("")
    assert row.pop("reducible") == pytest.approx(plain.mean - 0.25)
    assert row == plain.row("")
    first, *_, last = (line.split() for line in found.lines(5))
    assert first == ["t", "loss", "optimal", "reducible"]
    assert [float(cell) for cell in last[1:]] == pytest.approx([plain.mean, 0.25, plain.mean - 0.25], abs=1e-5)
    assert [line.split()[:2] for line in found.lines()] == [line.split()[:2] for line in plain.lines()]
