"""Processes against diffusers, scipy and their own definitions."""

import math

import numpy as np
import pytest
import torch
from diffusers import (
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from noisewise.levels import first_ticks, interval
from noisewise.processes import DDPM, EDM, PROCESSES, VE, VP, Flow, check_same
from noisewise.spec import build_process

DISCRETE = ("linear", "cosine", "quadratic")
CONTINUOUS = tuple(name for name in PROCESSES if name not in DISCRETE)
SCHEDULES = [(DDPM.linear, "linear"), (DDPM.quadratic, "scaled_linear"), (DDPM.cosine, "squaredcos_cap_v2")]


def scheduler(name="linear", steps=1000, **options):
    return DDPMScheduler(steps, beta_start=1e-4, beta_end=0.02, beta_schedule=name, **options)


def middles(steps, dtype=torch.float32):
    return (torch.arange(steps, dtype=dtype) + 0.5) / steps


def inner(n=197):
    return torch.linspace(0.01, 0.99, n, dtype=torch.float64)


def build(name):
    return PROCESSES[name]()


# Equality with diffusers


@pytest.mark.parametrize("steps", [2, 100, 1000])
@pytest.mark.parametrize(("make", "theirs"), SCHEDULES)
def test_schedule_equals_diffusers(make, theirs, steps):
    ours, reference = make(steps), scheduler(theirs, steps)
    torch.testing.assert_close(ours.alphas_cumprod.float(), reference.alphas_cumprod, rtol=3e-4, atol=1e-12)
    torch.testing.assert_close(ours.betas.float(), reference.betas, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(("make", "theirs"), SCHEDULES)
def test_add_noise_equals_diffusers(make, theirs):
    torch.manual_seed(0)
    x0, noise, t = torch.randn(64, 3, 4, 4), torch.randn(64, 3, 4, 4), torch.randint(0, 1000, (64,))
    process = make(1000)
    expected = scheduler(theirs).add_noise(x0, noise, t)
    torch.testing.assert_close(process.add_noise(x0, noise, process.u_of_time(t)), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("zero_terminal", [False, True])
@pytest.mark.parametrize("theirs", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_from_diffusers_is_exact(theirs, zero_terminal):
    reference = scheduler(theirs, rescale_betas_zero_snr=zero_terminal)
    process = DDPM.from_diffusers(reference)
    torch.testing.assert_close(process.alphas_cumprod, reference.alphas_cumprod.double(), rtol=0, atol=0)
    torch.testing.assert_close(process.betas, reference.betas.double(), rtol=0, atol=2e-7)
    alpha, sigma = process.scales(middles(1000))
    torch.testing.assert_close(alpha, reference.alphas_cumprod.sqrt())
    torch.testing.assert_close(sigma, (1 - reference.alphas_cumprod).sqrt())


@pytest.mark.parametrize(
    "solver", [EulerDiscreteScheduler, EulerAncestralDiscreteScheduler, DPMSolverMultistepScheduler, UniPCMultistepScheduler]
)
@pytest.mark.parametrize("theirs", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_a_zero_that_a_solver_writes_as_something_small_is_read_as_zero(theirs, solver):
    process = DDPM.from_diffusers(solver(beta_schedule=theirs, rescale_betas_zero_snr=True))
    torch.testing.assert_close(process.alphas_cumprod, scheduler(theirs, rescale_betas_zero_snr=True).alphas_cumprod.double())
    assert process.log_snr(torch.ones(1)).item() == -math.inf


def test_zero_terminal_snr():
    process = DDPM.from_diffusers(scheduler(rescale_betas_zero_snr=True))
    end = torch.ones(1)
    alpha, sigma = process.scales(end)
    assert (alpha.item(), sigma.item(), process.log_snr(end).item()) == (0.0, 1.0, -math.inf)
    assert process.betas[-1] == 1
    rates = process.log_snr_rate(middles(1000))
    assert bool(torch.isfinite(rates).all())
    assert bool((rates < 0).all())
    assert process.index(process.u_of_log_snr(torch.tensor([-math.inf]))).item() == 999


@pytest.mark.parametrize(
    ("theirs", "advice"), [(FlowMatchEulerDiscreteScheduler, r"Flow\(\)"), (EDMEulerScheduler, r"EDM\(\)")]
)
def test_from_diffusers_refuses_other_schedulers_with_advice(theirs, advice):
    with pytest.raises(TypeError, match=f"{theirs.__name__}.*alphas_cumprod.*{advice}"):
        DDPM.from_diffusers(theirs())


# Exact indices


def test_index_is_exact_for_every_number_of_steps():
    t = torch.arange(10_000)
    for steps in range(1, 10_001):
        process, wanted = DDPM.__new__(DDPM), t[:steps]
        process.steps = steps  # all that index reads; building 10,000 tables would take long
        assert torch.equal(process.index(wanted / steps), wanted), f"left edges at T = {steps}"
        assert torch.equal(process.index((wanted + 0.5) / steps), wanted), f"middles at T = {steps}"
        assert process.index(torch.tensor([0.0, 1.0])).tolist() == [0, steps - 1], f"ends at T = {steps}"


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 255, 256, 999, 1000, 4000, 9999, 10_000])
def test_index_of_a_built_process(steps):
    process, t = DDPM.linear(steps), torch.arange(steps)
    assert process.steps == steps
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(process.index(t.to(dtype) / steps), t)
        assert torch.equal(process.index((t.to(dtype) + 0.5) / steps), t)
        last_inside = (t.double() + 1) / steps - 2.0**-20
        assert torch.equal(process.index(last_inside.to(dtype)), t)
    assert torch.equal(process.time(process.u_of_time(t)), t)


def test_time_of_ddpm_is_an_integer():
    assert DDPM.linear(10).time(torch.tensor([0.0, 0.55, 1.0])).tolist() == [0, 5, 9]
    assert DDPM.linear(10).time(torch.rand(3)).dtype == torch.int64


# Direction, consistency, derivatives, inverses


@pytest.mark.parametrize("name", PROCESSES)
def test_noise_grows_with_u(name):
    process = build(name)
    u = middles(process.steps or 500, torch.float64)
    alpha, sigma = process.scales(u)
    assert bool((process.log_snr(u).diff() < 0).all())
    assert bool((sigma.diff() > 0).all())
    assert bool((alpha.diff() <= 0).all())
    assert bool((process.log_snr_rate(u) < 0).all())
    ends = process.log_snr(torch.tensor([0.0, 1.0]))
    assert ends[0] >= process.log_snr(u.float()).max()
    assert ends[1] <= process.log_snr(u.float()).min()


@pytest.mark.parametrize("name", PROCESSES)
def test_scales_agree_with_log_snr(name):
    process, u = build(name), inner()
    alpha, sigma = process.scales(u)
    torch.testing.assert_close(alpha**2 / sigma**2, process.log_snr(u).exp(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", [*DISCRETE, "vp"])
def test_variance_is_preserved(name):
    alpha, sigma = build(name).scales(inner())
    torch.testing.assert_close(alpha**2 + sigma**2, torch.ones_like(alpha), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_rate_is_the_derivative(name):
    process, u, h = build(name), inner(), 1e-6
    numeric = (process.log_snr(u + h) - process.log_snr(u - h)) / (2 * h)
    torch.testing.assert_close(process.log_snr_rate(u), numeric, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", DISCRETE)
def test_rate_of_ddpm_is_the_difference_of_its_edges(name):
    process = build(name)
    edges = process.log_snr_edges(torch.arange(1001, dtype=torch.float64) / 1000)
    bar = process.alphas_cumprod.numpy()
    values = np.log(bar / (1 - bar))
    np.testing.assert_allclose(edges[1:-1].numpy(), (values[1:] + values[:-1]) / 2, rtol=1e-9)
    np.testing.assert_allclose((edges[0] - values[0]).item(), values[0] - (values[0] + values[1]) / 2, rtol=1e-6)
    torch.testing.assert_close(process.log_snr_rate(middles(1000, torch.float64)), edges.diff() * 1000, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", PROCESSES)
def test_u_of_time_inverts_time(name):
    process = build(name)
    u = middles(process.steps or 300).clamp(0.005, 0.995) if process.steps is None else middles(process.steps)
    torch.testing.assert_close(process.u_of_time(process.time(u)), u, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", PROCESSES)
def test_u_of_log_snr_inverts_log_snr(name):
    process = build(name)
    u = middles(process.steps) if process.steps else middles(300, torch.float64)
    torch.testing.assert_close(process.u_of_log_snr(process.log_snr(u)), u, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", PROCESSES)
def test_u_of_log_snr_stays_in_range(name):
    u = build(name).u_of_log_snr(torch.tensor([-math.inf, -200.0, 0.0, 200.0, math.inf]))
    assert bool(((u >= 0) & (u <= 1)).all())
    assert bool((u.diff() <= 0).all())
    assert u[0] > 0.99
    assert u[-1] < 0.01


@given(betas=st.lists(st.floats(1e-5, 0.9), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_betas(betas):
    process = DDPM(torch.tensor(betas, dtype=torch.float64))
    u = middles(len(betas), torch.float64)
    np.testing.assert_allclose(process.alphas_cumprod.numpy(), np.cumprod(1 - np.array(betas)), rtol=1e-12)
    assert bool(torch.isfinite(process.log_snr(u)).all())
    assert bool((process.log_snr_rate(u) < 0).all())
    assert torch.equal(process.index(process.u_of_log_snr(process.log_snr(u))), torch.arange(len(betas)))


# Closed forms


def test_edm_sigma_is_lognormal():
    u = torch.tensor([1e-4, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.9999], dtype=torch.float64)
    alpha, sigma = EDM(mean=-1.2, std=1.2).scales(u)
    np.testing.assert_allclose(sigma.numpy(), stats.lognorm(s=1.2, scale=math.exp(-1.2)).ppf(u.numpy()), rtol=1e-9)
    assert bool((alpha == 1).all())
    torch.testing.assert_close(EDM().time(u), sigma.log() / 4)


def test_ve_is_geometric():
    sigma = VE(0.01, 50.0).scales(torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64))[1]
    np.testing.assert_allclose(sigma.numpy(), [0.01, math.sqrt(0.01 * 50), 50.0], rtol=1e-9)


def test_vp_integrates_beta():
    process, u = VP(0.1, 20.0, eps=0.0), inner(9)
    t = np.linspace(0, 1, 100_001)
    integral = np.concatenate([[0], np.cumsum((0.1 + 19.9 * (t[1:] + t[:-1]) / 2) * np.diff(t))])
    expected = np.exp(-np.interp(u.numpy(), t, integral) / 2)
    np.testing.assert_allclose(process.scales(u)[0].numpy(), expected, rtol=1e-6)


def test_vp_is_the_limit_of_ddpm():
    u = inner(50)
    fine = DDPM.linear(10_000, 1e-5, 2e-3)
    torch.testing.assert_close(fine.log_snr(u), VP().log_snr(u), rtol=0, atol=0.03)


def test_the_other_direction_of_time():
    """torchcfm and SiT: data at t = 1. Noise levels are the same, so log SNR still falls as u grows."""
    u = torch.tensor([0.0, 0.25, 0.5, 1.0])
    turned, plain = Flow(time_scale=1000, data_at=1), Flow(time_scale=1000)
    assert turned.time(u).tolist() == [1000, 750, 500, 0]
    torch.testing.assert_close(turned.u_of_time(turned.time(u)), u)
    for mine, theirs in zip((*turned.scales(u), turned.log_snr(u)), (*plain.scales(u), plain.log_snr(u)), strict=True):
        assert torch.equal(mine, theirs)
    assert build_process("flow:data_at=1,time_scale=10").time(u).tolist() == [10, 7.5, 5, 0]
    with pytest.raises(ValueError, match="another process"):
        check_same(turned, plain, "this")


def test_flow_is_a_straight_line():
    x0, noise, u = torch.randn(5, 2), torch.randn(5, 2), torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    torch.testing.assert_close(Flow().add_noise(x0, noise, u), torch.lerp(x0, noise, u[:, None]))
    assert Flow(time_scale=1000).time(u).tolist() == [0, 250, 500, 750, 1000]
    assert Flow().log_snr(torch.tensor([0.0, 0.5, 1.0])).tolist() == [math.inf, 0.0, -math.inf]


# Types, shapes and bad input


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("method", ["time", "scales", "log_snr", "log_snr_rate"])
@pytest.mark.parametrize("name", PROCESSES)
def test_low_precision_u_is_refused(name, method, dtype):
    with pytest.raises(TypeError, match="u must be float32 or float64"):
        getattr(build(name), method)(torch.tensor([0.5]).to(dtype))


def test_low_precision_timesteps_are_refused():
    with pytest.raises(TypeError, match="cannot hold them all"):
        DDPM.linear().u_of_time(torch.arange(1000).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", PROCESSES)
def test_precision_is_kept(name, dtype):
    process, u = build(name), torch.tensor([0.2, 0.7], dtype=dtype)
    outputs = [*process.scales(u), process.log_snr(u), process.log_snr_rate(u), process.u_of_log_snr(process.log_snr(u))]
    if process.steps is None:
        outputs += [process.time(u), process.u_of_time(process.time(u))]
    assert {output.dtype for output in outputs} == {dtype}


def test_tables_are_double_whatever_was_asked_first():
    process, u = DDPM.linear(), inner()
    process.log_snr(u.float())
    bar = process.alphas_cumprod[process.index(u)]
    torch.testing.assert_close(process.log_snr(u), torch.log(bar / (1 - bar)), rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(6,), (6, 2), (6, 5, 3), (6, 3, 4, 4), (6, 2, 3, 4, 4)])
@pytest.mark.parametrize("name", PROCESSES)
def test_add_noise_for_any_shape(name, shape):
    torch.manual_seed(0)
    process, u = build(name), torch.rand(6)
    x0, noise = torch.randn(shape), torch.randn(shape)
    alpha, sigma = process.scales(u)
    expected = torch.stack([alpha[i] * x0[i] + sigma[i] * noise[i] for i in range(6)])
    torch.testing.assert_close(process.add_noise(x0, noise, u), expected)
    assert process.add_noise(x0.double(), noise.double(), u).dtype == torch.float64
    assert process.add_noise(x0.bfloat16(), noise.bfloat16(), u).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("noise", "u", "message"),
    [((3, 1), (3,), "noise must have the shape of x0"), ((3, 2), (2,), "one entry a sample"), ((3, 2), (3, 1), "one entry")],
)
def test_add_noise_refuses_wrong_shapes(noise, u, message):
    with pytest.raises(ValueError, match=message):
        Flow().add_noise(torch.zeros(3, 2), torch.zeros(noise), torch.full(u, 0.5))


def test_add_noise_refuses_integer_data():
    pixels = torch.full((2, 3), 200, dtype=torch.uint8)
    with pytest.raises(TypeError):
        Flow().add_noise(pixels, torch.randn(2, 3), torch.full((2,), 0.5))


@pytest.mark.parametrize("make", [DDPM.linear, DDPM.quadratic, DDPM.cosine])
def test_one_timestep(make):
    process, u = make(1), torch.tensor([0.0, 0.5, 1.0])
    assert process.time(u).tolist() == [0, 0, 0]
    for output in (*process.scales(u), process.log_snr(u), process.log_snr_rate(u)):
        assert bool(torch.isfinite(output).all())
    assert process.u_of_log_snr(process.log_snr(u)).tolist() == [0.5, 0.5, 0.5]
    assert bool((process.log_snr_rate(u) < 0).all())


@pytest.mark.parametrize("betas", [[1.0], [0.5, 1.0], [0.1, 0.2, 1.0]])
def test_short_schedules_with_zero_terminal_snr_have_finite_rates(betas):
    process = DDPM(torch.tensor(betas))
    rates = process.log_snr_rate(middles(len(betas)))
    assert bool(torch.isfinite(rates).all())
    assert bool((rates < 0).all())


@pytest.mark.parametrize(
    ("betas", "message"),
    [
        ([], "at least one value"),
        ([[0.1, 0.2]], "must be a vector"),
        ([0.1, 0.0], r"\(0, 1\]"),
        ([0.1, -0.2], r"\(0, 1\]"),
        ([0.1, 1.2], r"\(0, 1\]"),
        ([0.1, math.nan], r"\(0, 1\]"),
        ([0.1, 1.0, 0.1], "only the last beta may be 1"),
    ],
)
def test_wrong_betas(betas, message):
    with pytest.raises(ValueError, match=message):
        DDPM(torch.tensor(betas))


def test_a_schedule_by_name():
    with pytest.raises(TypeError, match=r"DDPM takes a vector of betas, got 'linear': write DDPM\.linear\(\)"):
        DDPM("linear")


LINEAR, COSINE = DDPM.linear(), DDPM.cosine(4000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "table",
    [LINEAR.alphas_cumprod, 1 - LINEAR.betas, COSINE.alphas_cumprod, 1 - COSINE.betas],
    ids=["linear alphas_cumprod", "linear alphas", "cosine alphas_cumprod", "cosine alphas"],
)
def test_tables_of_alphas_are_not_taken_for_betas(table, dtype):
    with pytest.raises(
        ValueError, match=r"cannot begin at .* alphas_cumprod\? then use DDPM.from_alphas_cumprod; .* 1 - alphas"
    ):
        DDPM(table.to(dtype))


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 10])
def test_short_schedules_may_begin_with_much_noise(steps):
    assert DDPM.cosine(steps).steps == DDPM.linear(steps, 0.6, 0.95).steps == DDPM.linear(steps, 0.6, 0.6).steps == steps
    assert DDPM.linear(steps, 0.9, 0.6).steps == steps


def test_the_noisier_part_of_a_schedule_is_one_too():
    bar = LINEAR.alphas_cumprod[500:]
    betas = DDPM.from_alphas_cumprod(bar).betas
    assert float(betas[0]) > 0.9
    torch.testing.assert_close(DDPM(betas).alphas_cumprod, bar)


@pytest.mark.parametrize("bar", [[0.9, 0.95], [1.0, 0.5], [0.9, -0.1], [0.9, 0.9], [0.9, math.nan]])
def test_wrong_alphas_cumprod(bar):
    with pytest.raises(ValueError, match="must fall"):
        DDPM.from_alphas_cumprod(torch.tensor(bar))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DDPM.linear(0),
        lambda: DDPM.cosine(-1),
        lambda: DDPM.quadratic(1e3),
        lambda: VP(beta_min=3.0, beta_max=2.0),
        lambda: VP(eps=1.0),
        lambda: VP(time_scale=0.0),
        lambda: VE(sigma_min=0.0),
        lambda: VE(2.0, 1.0),
        lambda: EDM(std=0.0),
        lambda: EDM(std=math.nan),
        lambda: Flow(time_scale=0.0),
        lambda: Flow(data_at=2),
        lambda: Flow(time_scale=math.nan),
    ],
)
def test_wrong_settings(make):
    with pytest.raises(ValueError, match=r"need|must"):
        make()


@pytest.mark.parametrize("n", [1, 2, 3, 7, 1000, 4000])
def test_the_first_ticks_of_intervals_are_where_interval_changes(n):
    edges = torch.arange(n + 1) / n
    u = torch.cat(
        [edges, torch.nextafter(edges, torch.tensor(0.0)), torch.rand(5000, generator=torch.Generator().manual_seed(0))]
    )
    assert torch.equal(torch.bucketize((u * 2**24).round(), first_ticks(n), right=True), interval(u, n))
