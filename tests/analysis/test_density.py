"""Densities over u and over log SNR: integrals, analytic answers, what runs and specs give."""

import csv
import json
import math

import numpy as np
import pytest
import torch

from noisewise.analysis import density
from noisewise.analysis.density import MOMENTS, History, no_signal, of_spec, over_log_snr, refined, rows_of, smooth
from noisewise.commands.cli import main
from noisewise.processes import DDPM, EDM, PROCESSES, Flow
from noisewise.spec import build_process
from tests.analysis.asking import asked
from tests.study.made import curve, planted


def integral(process, values):
    log_snr, curve = over_log_snr(process, values)
    if process.steps is None:
        return float(np.trapezoid(curve, -log_snr))
    edges = process.log_snr_edges(torch.arange(process.steps + 1) / process.steps).double().numpy()
    return float((curve * -np.diff(edges)[: len(curve)]).sum())


TILTED = np.linspace(1.8, 0.2, 50)


@pytest.mark.parametrize("values", [np.ones(50), TILTED, np.repeat([0.0, 2.0], 25)], ids=["flat", "tilted", "half"])
@pytest.mark.parametrize("name", [*PROCESSES, "linear:steps=7", "linear:steps=333"])  # some fit into no 50 intervals
def test_a_density_over_log_snr_integrates_to_one(name, values):
    process = build_process(name)
    assert integral(process, values) == pytest.approx(1, abs=3e-3 if process.steps is None else 1e-5)


def test_uniform_sampling_of_edm_is_a_normal_density_over_log_snr():
    log_snr, curve = over_log_snr(EDM(), np.ones(50))
    expected = np.exp(-(((log_snr - 2.4) / 2.4) ** 2) / 2) / (2.4 * math.sqrt(2 * math.pi))
    np.testing.assert_allclose(curve, expected, rtol=1e-6)


def test_uniform_sampling_of_flow_is_a_logistic_density_over_half_the_log_snr():
    log_snr, curve = over_log_snr(Flow(), np.ones(50))
    share = 1 / (1 + np.exp(-log_snr / 2))
    np.testing.assert_allclose(curve, share * (1 - share) / 2, rtol=1e-6)


def test_draws_without_signal_are_left_out_and_counted():
    process = DDPM.from_alphas_cumprod(torch.linspace(0.99, 0, 100))
    log_snr, curve = over_log_snr(process, np.ones(50))
    assert len(log_snr) == 99
    assert np.isfinite([log_snr, curve]).all()
    assert no_signal(process, np.ones(50)) == pytest.approx(0.01)
    assert integral(process, np.ones(50)) == pytest.approx(0.99)
    assert "1.0% of the draws have no signal" in density.sentence(of_spec("uniform", process))
    assert no_signal(DDPM.linear(), TILTED) == 0


def test_refining_keeps_the_mass():
    np.testing.assert_allclose(refined(np.array([1.0, 3.0]), 4), [1, 1, 3, 3])
    np.testing.assert_allclose(refined(np.array([1.0, 3.0, 2.0]), 2), [(1 * 2 + 3) / 3, (3 + 2 * 2) / 3])
    assert smooth(TILTED).mean() == pytest.approx(1)
    np.testing.assert_allclose(smooth(np.ones(50)), 1)


def test_rows_hold_all_three_densities():
    assert of_spec("minsnr", DDPM.linear()).weighted
    assert not of_spec("speed", DDPM.linear()).weighted
    history = History("one", EDM(), [10, 20], np.stack([np.ones(50), TILTED]), np.ones((2, 50)))
    rows = rows_of(history)
    assert len(rows) == 100
    assert [rows[50][key] for key in ("sampler", "step", "density", "objective")] == ["one", 20, 1.8, 1.0]
    assert rows[50]["u"] == pytest.approx(0.01)
    rate = float(EDM().log_snr_rate(torch.tensor([0.01], dtype=torch.float64)).abs())
    assert rows[50]["density_over_log_snr"] == pytest.approx(1.8 / rate)


CURVES = {("linear", sampler, seed): curve(3.0, 2.0) for sampler in ("uniform", "adaptive") for seed in (0, 1)}


def test_a_comparison_is_shown_by_one_run_of_each_sampler(tmp_path):
    planted(tmp_path / "made", CURVES)
    result = asked(density, "--comparison", tmp_path / "made")
    assert list(dict.fromkeys(row["sampler"] for row in result.rows)) == ["uniform", "adaptive"]
    last = [row for row in result.rows if row["sampler"] == "adaptive" and row["step"] == 1000]
    assert [last[0]["density"], last[-1]["density"]] == pytest.approx([1 + 0.8 * 0.98, 1 - 0.8 * 0.98], abs=1e-4)
    assert {row["objective"] for row in last} == {1.0}
    assert "2 of 4" in result.says[0]
    assert [axis.get_title() for axis in result.figure.axes[:2]] == ["uniform", "adaptive"]


def test_runs_are_named_by_what_tells_them_apart(tmp_path):
    made = planted(tmp_path, CURVES)
    folders = [outcome.folder for outcome in made.outcomes]
    labels = {row["sampler"] for row in asked(density, "--run", *folders).rows}
    assert labels == {"uniform, seed 0", "uniform, seed 1", "adaptive, seed 0", "adaptive, seed 1"}
    assert {row["sampler"] for row in asked(density, "--run", folders[0]).rows} == {"uniform"}


def test_a_long_run_is_thinned_out_and_keeps_both_ends(tmp_path):
    made = planted(tmp_path, {("linear", "uniform", 0): curve(1.0)})
    folder = made.outcomes[0].folder
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    (folder / "metrics.jsonl").write_text("".join(json.dumps({**row, "step": step}) + "\n" for step in range(1, 1001)))
    steps = sorted({row["step"] for row in asked(density, "--run", folder).rows})
    assert (steps[0], steps[-1], len(steps)) == (1, 1000, MOMENTS)


def test_what_cannot_be_shown_is_said(tmp_path):
    folder = planted(tmp_path / "made", {("linear", "uniform", 0): curve(1.0)}).outcomes[0].folder
    (folder / "metrics.jsonl").write_text("")
    for option, place, words in (
        ("--run", folder, "no density in its metrics.jsonl yet"),
        ("--comparison", tmp_path / "made", "no run of .* has a density"),
    ):
        with pytest.raises(ValueError, match=words):
            asked(density, option, place)


def test_learning_samplers_are_said_to_change():
    assert "adaptive: shown before training" in asked(density, "--samplers", "uniform,adaptive").says[0]


def test_the_command_draws_specs(tmp_path, capsys):
    assert main(["analyze", "density", "--samplers", "uniform,minsnr", "--process", "flow", "--out", str(tmp_path)]) == 0
    assert "minsnr: half of the draws are below u = 0.500" in capsys.readouterr().out
    with (tmp_path / "density.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["sampler", "step", "u", "log_snr", "density", "objective", "density_over_log_snr"]
    assert (tmp_path / "density.png").stat().st_size > 10_000
