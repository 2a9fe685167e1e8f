"""Optimal losses against closed forms and quadrature; the estimate from a part of the data against all of them."""

import json
import math

import numpy as np
import pytest
import torch

from noisewise import DDPM, EDM, VE, Flow, Objective
from noisewise.data import Synthetic, open_data
from noisewise.data.source import ArraySource
from noisewise.levels import over_samples
from noisewise.metrics import optimal_loss as module
from noisewise.metrics.optimal_loss import from_state, kept_optimal_loss, load_optimal_loss, optimal_loss, save_optimal_loss

X0 = Objective(DDPM.linear(), "x0")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def normal_mean(function, deviations=9.0, points=20_001):
    """E f(z) for a standard normal z, by the trapezoid rule."""
    z = np.linspace(-deviations, deviations, points)
    return np.trapezoid(function(z) * np.exp(-(z**2) / 2), z) / math.sqrt(2 * math.pi)


def few_points(points, ratio):
    """The optimal x0-loss of equally likely points on a line, by quadrature."""
    x = np.asarray(points, dtype=float)

    def squares(z):
        found = 0.0
        for made in x:
            logs = -((ratio * (made - x)[:, None] + z) ** 2) / 2
            p = np.exp(logs - logs.max(0))
            found = found + ((p * x[:, None]).sum(0) / p.sum(0) - made) ** 2 / len(x)
        return found

    return normal_mean(squares)


def mixture(means, std, ratio):
    """The optimal x0-loss of a mixture of two equal Gaussians on a line, by quadrature over y = ratio x0 + noise."""
    y = np.linspace(-12 - 6 * ratio, 12 + 6 * ratio, 40_001)
    variance = ratio**2 * std**2 + 1
    parts = np.stack([np.exp(-((y - ratio * m) ** 2) / 2 / variance) / math.sqrt(2 * math.pi * variance) / 2 for m in means])
    inner = np.stack([m + ratio * std**2 * (y - ratio * m) / variance for m in means])
    density = parts.sum(0)
    best = (parts * inner).sum(0) / np.maximum(density, 1e-300)
    second = std**2 + np.mean(np.square(means))
    return second - np.trapezoid(best**2 * density, y)


@pytest.mark.parametrize("points", [[-0.8, 0.8], [0.0, 0.1, 2.0, 2.0]])
def test_a_few_points_against_quadrature(points):
    found = optimal_loss(X0, torch.tensor(points)[:, None], 12, draws=20_000)
    expected = torch.tensor([few_points(points, math.exp(lam / 2)) for lam in found.log_snr.tolist()])
    assert found.exact
    assert (found.loss - expected).abs().le(4 * found.error + 1e-6).all()
    assert found.error.max() < 0.01 * expected.max()
    assert expected.max() > 100 * expected.min(), "levels with and without collapse"


@pytest.mark.parametrize("references", [None, 1500])
def test_a_gaussian_that_many_samples_stand_for(references):
    std = torch.tensor([0.5, 1.5])
    u = torch.linspace(0.2, 0.98, 9)
    found = optimal_loss(X0, randn(6000, 2) * std + 3, u, draws=3000, references=references)
    snr = found.log_snr.exp()[:, None]
    expected = (std.double() ** 2 / (1 + snr * std.double() ** 2)).mean(1)
    assert not found.memorised.any()
    tolerance = 4 * found.error + (0.02 + 2 * found.collapse * 6000 / found.references) * expected
    assert (found.loss - expected).abs().le(tolerance).all()
    assert tolerance.lt(0.2 * expected).all()
    assert found.high.ge(found.loss - 4 * found.error - 0.02 * expected).all()


def test_a_mixture_against_quadrature():
    means, std, count = (-1.0, 1.0), 0.2, 4000
    centres = torch.tensor(means).repeat(count // 2)
    found = optimal_loss(Objective(VE(0.05, 20.0), "x0"), (centres + std * randn(count))[:, None], 15, draws=2000)
    expected = torch.tensor([mixture(means, std, math.exp(lam / 2)) for lam in found.log_snr.tolist()])
    assert (found.loss - expected).abs().le(4 * found.error + 0.02 * expected).all()
    assert not found.memorised.any()


def test_one_sample_is_known_at_every_level():
    found = optimal_loss(Objective(Flow()), torch.ones(1, 3, 4, 4), 7, draws=5)
    assert torch.equal(found.loss, torch.zeros(7, dtype=torch.float64))
    assert torch.equal(found.collapse, torch.ones(7, dtype=torch.float64))
    assert found.memorised.all()


def test_where_nothing_is_left_of_the_data_the_loss_is_their_variance():
    x0 = randn(40, 1, 3, 3) * 0.7 + 2
    process = DDPM.from_alphas_cumprod(torch.linspace(0.9, 0, 10))
    variance = float(x0.double().var(0, correction=0).mean())
    for prediction, expected in {"x0": variance, "v": variance, "flow": variance, "eps": 0.0, "edm": variance / 0.25}.items():
        found = optimal_loss(Objective(process, prediction), x0, torch.tensor([0.99]), draws=8)
        assert float(found.loss) == pytest.approx(expected, rel=1e-5, abs=1e-9)
        assert float(found.effective) == pytest.approx(40, rel=1e-5)


@pytest.mark.parametrize("process", [DDPM.cosine(), EDM(), Flow(), VE()], ids=repr)
@pytest.mark.parametrize("prediction", ["eps", "x0", "v", "flow", "edm"])
def test_it_is_the_loss_of_the_model_that_knows_the_posterior(process, prediction):
    """Through Objective.losses, with a model that computes the softmax by its definition."""
    objective, data = Objective(process, prediction, sigma_data=0.7), randn(30, 4)
    u = torch.tensor([0.3, 0.6, 0.9])
    found = optimal_loss(objective, data, u, draws=4000)
    for level in range(3):
        rows = torch.randint(30, (4000,), generator=torch.Generator().manual_seed(level))
        at, noise = u[level].expand(4000), randn(4000, 4, seed=10 + level)
        alpha, sigma = (over_samples(scale, noise).double() for scale in process.scales(at))
        x_u = alpha * data[rows] + sigma * noise

        def model(inputs, time, at=at, alpha=alpha, sigma=sigma, x_u=x_u):
            logits = -(x_u[:, None] - alpha[:, None] * data).square().sum(2) / (2 * sigma**2)
            x0 = logits.softmax(1) @ data.double()
            return objective.target(x0, (x_u - alpha * x0) / sigma, at)

        losses = objective.losses(model, data[rows], at, noise).double()
        error = math.hypot(float(losses.std()) / 4000**0.5, float(found.error[level]))
        assert abs(float(losses.mean()) - float(found.loss[level])) < 4 * error + 1e-5


def test_a_part_of_the_data_agrees_with_all_of_them():
    source = open_data("digits")
    whole = optimal_loss(X0, source, 20, draws=1500)
    part = optimal_loss(X0, source, 20, references=300, draws=1500, seed=1)
    assert whole.exact
    assert not part.exact
    assert torch.equal(whole.low, whole.loss)
    error = (whole.error**2 + part.error**2).sqrt()
    assert part.low.le(whole.loss + 4 * error).all()
    assert part.high.ge(whole.loss - 4 * error).all()
    assert part.low.le(part.loss + part.error).all()
    many = whole.effective * 300 / len(source) > 50  # so many of the references can be meant
    assert 5 < many.sum() < 18
    difference = (part.loss - whole.loss).abs()[many]
    assert difference.le(4 * error[many] + 0.005 * whole.loss[many]).all()
    torch.testing.assert_close(part.collapse[many], whole.collapse[many], rtol=0.3, atol=0)
    # the correction is what makes them agree
    middle = (whole.collapse > 0.05) & (whole.collapse < 0.95)
    assert (part.low - whole.loss).abs()[middle].gt(1.2 * (part.loss - whole.loss).abs()[middle]).all()


def test_errors_are_what_other_seeds_show():
    source = open_data("digits")
    for references in (None, 200):
        found = [optimal_loss(X0, source, 6, references=references, draws=160, seed=seed) for seed in range(30)]
        spread = torch.stack([one.loss for one in found]).std(0)
        stated = torch.stack([one.error for one in found]).square().mean(0).sqrt()
        inside = torch.stack([one.collapse for one in found]).mean(0) < 0.9
        assert inside.sum() >= 4
        ratio = (spread / stated)[inside]
        assert ratio.gt(0.6).all()
        assert ratio.lt(1.5).all()


def test_the_upper_bound_is_sure_at_much_noise_and_never_below_the_loss():
    source, u = open_data("digits"), torch.tensor([0.2, 0.5, 0.7, 0.9])
    found = [optimal_loss(X0, source, u, draws=100, seed=seed) for seed in range(20)]
    assert all((one.high >= one.loss).all() for one in found)
    high = torch.stack([one.high for one in found])
    assert (high.std(0) / high.mean(0))[2:].lt(0.005).all()  # |x_g|^2 alone differs by 3 %


def test_new_data_lie_between_memory_and_the_sample_left_out():
    """The optimum of a Gaussian itself: no less than that of its samples, no more than with the sample left out."""
    x0, u = randn(200, 8), torch.tensor([0.1, 0.2, 0.3, 0.5])
    found = optimal_loss(X0, x0, u, draws=4000)
    expected = 1 / (1 + found.log_snr.exp())
    assert found.memorised[0]
    assert found.loss[:3].lt(expected[:3]).all()
    assert found.high[:3].gt(expected[:3]).all()


def test_mirror_images_count_as_samples():
    x0 = randn(12, 1, 3, 4)
    flipped = optimal_loss(X0, x0, 5, flip=True, draws=100)
    both = optimal_loss(X0, torch.cat([x0, x0.flip(-1)]), 5, draws=100)
    assert flipped.samples == 24
    assert torch.equal(flipped.loss, both.loss)
    values = ((x0[:, 0] + 4) * 30).clamp(0, 255).byte().numpy()
    source = ArraySource("made", values[:, None], image=True)
    as_tensor = optimal_loss(X0, source.decode(torch.from_numpy(values[:, None])), 5, flip=True, draws=100)
    assert torch.equal(optimal_loss(X0, source, 5, flip=True, draws=100).loss, as_tensor.loss)


def test_a_model_that_is_told_the_class_has_the_loss_of_each_class():
    x0, labels = randn(60, 3), torch.arange(60) % 3 // 2  # 40 and 20 of them
    told = optimal_loss(X0, x0, 6, labels=labels, draws=6000)
    apart = [optimal_loss(X0, x0[labels == label], 6, draws=6000) for label in (0, 1)]
    expected = (2 * apart[0].loss + apart[1].loss) / 3
    error = (told.error**2 + apart[0].error ** 2 + apart[1].error ** 2).sqrt()
    assert (told.loss - expected).abs().le(4 * error).all()
    one = optimal_loss(X0, x0, 6, labels=torch.zeros(60, dtype=torch.long), draws=200)
    assert torch.equal(one.loss, optimal_loss(X0, x0, 6, draws=200).loss)
    digits = open_data("digits")
    assert optimal_loss(X0, digits, 5, classes=True, draws=100).loss[2] < optimal_loss(X0, digits, 5, draws=100).loss[2]
    alone = optimal_loss(X0, x0[:2], 3, labels=torch.tensor([0, 1]), draws=4)
    assert torch.equal(alone.loss, torch.zeros(3, dtype=torch.float64))


def test_classes_are_corrected_one_by_one():
    x0, labels = randn(3000, 2), (torch.arange(3000) % 10 == 0).long()
    u = torch.tensor([0.5, 0.7, 0.9])
    whole = optimal_loss(X0, x0, u, labels=labels, draws=2000)
    part = optimal_loss(X0, x0, u, labels=labels, draws=2000, references=1000)
    assert (part.loss - whole.loss).abs().le(4 * (part.error**2 + whole.error**2).sqrt() + 0.01 * whole.loss).all()


def test_neither_blocks_nor_a_shift_nor_the_random_state_matter(monkeypatch):
    x0, seen = randn(50, 6), []
    state = torch.get_rng_state()
    found = optimal_loss(X0, x0, 5, draws=37, progress=seen.append)
    assert torch.equal(torch.get_rng_state(), state)
    assert sum(seen) == 37 * 5
    shifted = optimal_loss(X0, x0.double() + 1000, 5, draws=37)
    torch.testing.assert_close(shifted.loss, found.loss, rtol=1e-3, atol=1e-9)
    monkeypatch.setattr(module, "MOST", 120)
    monkeypatch.setattr(module, "READ", 7)
    blocks = optimal_loss(X0, x0, 5, draws=37)
    torch.testing.assert_close(blocks.loss, found.loss, rtol=1e-5, atol=1e-12)


def test_little_noise_on_samples_that_are_close():
    """Two samples 1e-3 apart, at a SNR that resolves them in part, far from zero and among others."""
    x0 = torch.tensor([[0.9], [0.901], [-0.9]])
    process = VE(1e-4, 10.0)
    found = optimal_loss(Objective(process, "x0"), x0, process.u_of_log_snr(-2 * torch.tensor([2e-3, 5e-4]).log()), draws=8000)
    expected = [2 / 3 * few_points([0, 1e-3], 1 / sigma) for sigma in (2e-3, 5e-4)]
    assert found.loss.tolist() == pytest.approx(expected, rel=0.03)


def test_other_levels_and_other_objectives():
    source = open_data("digits")
    linear = Objective(DDPM.linear(), "eps")
    found = optimal_loss(linear, source, 50, draws=300)
    torch.testing.assert_close(found.at(found.u), found.loss, rtol=1e-9, atol=1e-15)
    backwards = optimal_loss(linear, source, found.u.flip(0), draws=300)
    torch.testing.assert_close(backwards.at(found.u), found.loss, rtol=1e-9, atol=1e-15)
    for other in (Objective(DDPM.quadratic(), "v"), Objective(Flow())):
        u = torch.linspace(0.35, 0.9, 7)
        there = optimal_loss(other, source, u, draws=300)
        torch.testing.assert_close(found.at(u, other), there.loss, rtol=0.02, atol=0)
        again = from_state(found.state(), other)
        middle = slice(15, 40)
        torch.testing.assert_close(again.at(again.u[middle]), again.loss[middle], rtol=0.05, atol=1e-4)


def test_a_file_keeps_it(tmp_path):
    found = optimal_loss(Objective(EDM()), randn(20, 3), 9, draws=50)
    save_optimal_loss(found, tmp_path / "deep" / "optimal.json")
    again = load_optimal_loss(tmp_path / "deep" / "optimal.json", found.objective)
    torch.testing.assert_close(again.loss, found.loss, rtol=1e-12, atol=0)
    assert torch.equal(again.u, found.u)
    assert (again.samples, again.references, again.draws, again.exact) == (20, 20, 50, True)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["optimal.json"]
    for text in ("{", "[]", json.dumps({**found.state(), "loss": [1.0]}), json.dumps({"format": "else"})):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match=r"other\.json cannot be read"):
            load_optimal_loss(tmp_path / "other.json", found.objective)


def test_the_cache_is_used_and_a_damaged_file_is_not(tmp_path, monkeypatch):
    source, read = Synthetic((1, 4, 4), count=30), []
    monkeypatch.setattr(type(source), "read", lambda self, rows: read.append(1) or ArraySource.read(self, rows))
    first = kept_optimal_loss(Objective(DDPM.linear()), source, 6, draws=20, folder=tmp_path)
    assert read
    read.clear()
    same = kept_optimal_loss(Objective(DDPM.linear()), source, 6, draws=20, folder=tmp_path)
    torch.testing.assert_close(same.loss, first.loss, rtol=1e-12, atol=0)
    v = kept_optimal_loss(Objective(DDPM.linear(), "v"), source, 6, draws=20, folder=tmp_path)
    assert not read, "another prediction follows from the same file"
    torch.testing.assert_close(v.loss, first.at(first.u, v.objective), rtol=1e-9, atol=0)
    for changed in ({"draws": 21}, {"seed": 1}, {"references": 5}, {"flip": True}):
        read.clear()
        kept_optimal_loss(Objective(DDPM.linear()), source, 6, folder=tmp_path, **{"draws": 20} | changed)
        assert read, f"{changed} is another optimum"
    for path in tmp_path.iterdir():
        path.write_text(path.read_text()[:100])
    with pytest.warns(UserWarning, match="computing the optimal loss again"):
        mended = kept_optimal_loss(Objective(DDPM.linear()), source, 6, draws=20, folder=tmp_path)
    assert torch.equal(mended.loss, first.loss)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"objective": Objective(DDPM.linear(), loss="l1")}, "optimal for loss='mse' alone"),
        ({"data": torch.zeros(4, dtype=torch.uint8)}, "must be floats of shape"),
        ({"draws": 1}, "draws must be >= 2, got 1"),
        ({"references": 0}, "references must be >= 1, got 0"),
        ({"levels": 0}, "levels must be a number >= 1"),
        ({"flip": True}, "flip mirrors pictures"),
        ({"labels": torch.zeros(3)}, "labels must be one a row"),
        ({"classes": True}, "classes=True is for a source with labels"),
    ],
)
def test_what_cannot_be_is_refused(settings, words):
    given = {"objective": X0, "data": randn(5, 2), "levels": 3} | settings
    with pytest.raises(ValueError, match=words):
        optimal_loss(given.pop("objective"), given.pop("data"), given.pop("levels"), **given)


def test_a_gpu_says_the_same():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    source = open_data("digits")
    here, there = (optimal_loss(X0, source, 10, references=400, device=device) for device in ("cpu", "cuda"))
    torch.testing.assert_close(there.loss, here.loss, rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(there.collapse, here.collapse, rtol=1e-4, atol=0)
