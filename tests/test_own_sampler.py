"""The newcomer's example: it runs, it is short, and its sampler keeps the contract."""

import importlib.util
import inspect
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from scipy import stats
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import noisewise
from noisewise import DDPM, SAMPLERS, Flow, Sampler
from noisewise.levels import visible
from noisewise.processes import Process
from noisewise.samplers import base

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
EXAMPLE = Path(__file__).parent.parent / "examples" / "own_sampler.py"


@pytest.fixture
def example() -> Iterator[ModuleType]:
    before = dict(SAMPLERS)
    spec = importlib.util.spec_from_file_location("own_sampler", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_sampler"] = module  # inspect looks sources up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["own_sampler"]
    SAMPLERS.clear()
    SAMPLERS.update(before)


def test_script_trains_and_prints_its_loss() -> None:
    result = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.strip().splitlines()
    assert [line.split(": loss ")[0] for line in lines] == [
        "uniform",
        "triangular:peak=0.3",
        "mix:of=(triangular:peak=0.3),floor=0.1,correction=unbiased",
    ]
    for line in lines:
        before, after = map(float, line.split(": loss ")[1].split(" -> "))
        assert after < 0.5 * before


def test_class_has_fewer_than_thirty_lines(example: ModuleType) -> None:
    assert len(inspect.getsource(example.Triangular).splitlines()) < 30


def test_peak_is_checked(example: ModuleType) -> None:
    with pytest.raises(ValueError, match="peak must lie inside"):
        noisewise.recipe("triangular:peak=1", DDPM.linear())


@pytest.mark.parametrize("peak", [0.2, 0.5, 0.9])
def test_draws_follow_the_density(example: ModuleType, peak: float) -> None:
    sampler = noisewise.recipe(f"triangular:peak={peak}", Flow()).sampler
    u = sampler.sample(20_000).u.numpy()
    assert stats.kstest(u, stats.triang(c=peak).cdf).pvalue > 1e-3
    grid = torch.linspace(0, 1, 101)
    assert torch.allclose(sampler.density(grid).double(), torch.from_numpy(stats.triang(c=peak).pdf(grid.double())), atol=1e-4)


@pytest.mark.parametrize("correction", ["none", "unbiased", "clipped(5)", "tempered(0.5)"])
@pytest.mark.parametrize("spec", ["triangular:peak=0.3", "mix:of=(triangular:peak=0.3),floor=0.1"])
def test_weights_have_mean_one(example: ModuleType, spec: str, correction: str) -> None:
    sampler = noisewise.recipe(spec, DDPM.linear(), correction=correction, draws="stratified").sampler
    assert float(sampler.sample(2**16).weight.mean()) == pytest.approx(1, abs=0.01)


def test_unbiased_weights_undo_the_density(example: ModuleType) -> None:
    draw = noisewise.recipe("triangular:peak=0.3", Flow(), correction="unbiased", draws="stratified").sampler.sample(2**16)
    assert float((draw.weight * draw.u**2).mean()) == pytest.approx(1 / 3, abs=0.01)


class Rising(Sampler):
    """A table instead of the two methods."""

    def __init__(self, process: Process, **common: Any) -> None:
        super().__init__(process, table=torch.tensor([1.0, 3.0]), **common)


def test_a_table_of_masses_is_a_sampler() -> None:
    sampler = Rising(Flow(), correction="unbiased", draws="stratified")
    draw = sampler.sample(2**12)
    assert float((draw.u > 0.5).float().mean()) == pytest.approx(0.75, abs=1e-3)
    assert torch.equal(draw.density, torch.where(draw.u > 0.5, 1.5, 0.5))
    assert torch.equal(sampler.density(draw.u), draw.density)
    torch.testing.assert_close(draw.weight, 1 / draw.density)
    assert not any("table" in name for name in sampler.state_dict())


def test_a_sampler_without_a_density_says_what_is_missing() -> None:
    with pytest.raises(NotImplementedError, match=r"density\(\) and quantile\(\), or a table"):
        Sampler(Flow()).sample(4)


class OfTheData(Sampler):
    """u^(a - 1) with another a for each row."""

    conditional = True

    def power(self, x0: torch.Tensor) -> torch.Tensor:
        return 1 + 3 * x0.flatten(1).mean(1).abs()

    def density(self, u: torch.Tensor, x0: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ones_like(u) if x0 is None else self.power(x0) * u ** (self.power(x0) - 1)

    def quantile(self, v: torch.Tensor, x0: torch.Tensor | None = None) -> torch.Tensor:
        return v if x0 is None else v ** (1 / self.power(x0))


def test_weights_that_need_a_mean_for_each_sample_are_refused() -> None:
    x0 = torch.rand(2**16, 4, generator=torch.Generator().manual_seed(0))
    draw = OfTheData(Flow(), correction="unbiased").sample(x0)
    assert float((draw.weight * draw.u**2).mean()) == pytest.approx(1 / 3, abs=0.01)
    for correction in ("clipped(3)", "tempered(0.5)"):
        with pytest.raises(ValueError, match="which OfTheData does not know for each sample"):
            OfTheData(Flow(), correction=correction).sample(x0)


class Times(Sampler):
    """Mistakes a time for a noise level, if told so."""

    def __init__(self, process: Process, factor: float = 1000.0, **common: Any) -> None:
        super().__init__(process, **common)
        self.factor = factor

    def quantile(self, v: torch.Tensor, x0: torch.Tensor | None = None) -> torch.Tensor:
        return self.factor * v

    def density(self, u: torch.Tensor, x0: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ones_like(u)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize(("factor", "found"), [(1000.0, r"got [\d.]+ to [\d.]+"), (-1.0, "got -"), (math.nan, "got nan")])
def test_a_first_draw_that_is_no_noise_level_is_an_error(device: str, factor: float, found: str) -> None:
    sampler = Times(DDPM.linear(), factor)
    with pytest.raises(ValueError, match=f"Times drew what is no noise level: .*{found}.*u_of_time"):
        sampler.sample(torch.zeros(64, 3, device=device))


def test_only_the_first_draw_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr(base, "check_range", lambda u, wait: looked.append(wait))
    sampler = Times(DDPM.linear(), 0.5)
    for _ in range(3):
        sampler.sample(8)
    sampler.load_state_dict(sampler.state_dict())
    sampler.sample(8)
    assert looked == [True]


def test_a_draw_that_a_compiler_traces_is_looked_at_later(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Times(DDPM.linear())
    with monkeypatch.context() as compiling:
        compiling.setattr(torch.compiler, "is_compiling", lambda: True)
        sampler.sample(8)
    with pytest.raises(ValueError, match="no noise level"):
        sampler.sample(8)


def test_a_first_draw_without_numbers_is_not_looked_at() -> None:
    """Of shapes alone, as in an estimate of memory; or while something else than a compiler traces."""
    assert noisewise.recipe("adaptive", DDPM.linear()).sampler.sample(torch.empty(4, 2, device="meta")).u.shape == (4,)
    sampler = noisewise.recipe("uniform", DDPM.linear()).sampler
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert sampler.sample(torch.empty(4, 2)).u.shape == (4,)
    assert make_fx(lambda x0: sampler.sample(x0).u)(torch.zeros(4, 2)) is not None


def test_the_first_draw_compiles_in_one_piece() -> None:
    sampler = noisewise.recipe("uniform", DDPM.linear()).sampler
    drawn = torch.compile(lambda x0: sampler.sample(x0).u, backend="eager", fullgraph=True)(torch.zeros(4, 2))
    assert drawn.shape == (4,)


def test_a_device_is_asked_whether_it_records_only_where_nothing_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler cannot trace that question."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("asked"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)

    class OnCuda:
        device, is_cuda, is_meta = torch.device("cuda"), True, False

    assert not visible(OnCuda(), wait=True)  # type: ignore[arg-type]
