"""The verdict says no more than the seeds allow."""

import re

import pytest
import torch
from rich.console import Console

from noisewise.study.table import by_sampler, explanation, judged, print_table, ratio, spread, table_rows, verdict
from tests.study.made import measured


@pytest.mark.parametrize(
    ("mine", "verdict_is"),
    [
        ([1.0, 1.9], "better"),
        ([2.1, 3.0], "worse"),
        ([1.0, 2.5], "unclear"),
        ([2.0, 2.0], "unclear"),
        ([0.1, 2.0], "unclear"),  # a tie is no gain, however good the other seed
        ([float("nan"), 1.0], "unclear"),
    ],
)
def test_better_and_worse_need_every_seed(mine, verdict_is):
    """Pairs of one seed are compared: the baseline has 2 in both."""
    baseline = [measured("uniform", seed, 2.0) for seed in range(2)]
    assert verdict(baseline, [measured("other", seed, value) for seed, value in enumerate(mine)]) == verdict_is


def test_seeds_are_compared_with_their_own_baseline():
    """Both of the other's values lie between the baseline's, and below its own seed's."""
    baseline = [measured("uniform", 0, 1.0), measured("uniform", 1, 3.0)]
    runs = [measured("other", 0, 0.9), measured("other", 1, 2.9)]
    assert verdict(baseline, runs) == "better"
    assert ratio(baseline, runs) == pytest.approx((0.9 + 2.9 / 3) / 2)


def test_one_seed_is_not_judged():
    assert verdict([measured("uniform", 0, 2.0)], [measured("other", 0, 0.1)]) == "one seed"


def test_the_distance_decides_and_without_one_the_loss():
    assert judged(measured("a", 0, 3.0, loss=1.0)) == 3.0
    assert judged(measured("a", 0, None, loss=1.0)) == 1.0


def test_spread_is_the_mean_and_half_the_range():
    assert spread([1.0, 2.0, 4.0]) == "2.333 ± 1.5"
    assert spread([1.5]) == "1.5"


def test_rows_hold_the_numbers_and_the_baseline_comes_first():
    results = [measured(name, seed, value + seed) for seed in range(2) for name, value in (("uniform", 2.0), ("other", 1.0))]
    assert list(by_sampler(results)) == ["uniform", "other"]
    headings, rows = table_rows(results)
    assert headings[:5] == ["sampler", "steps", "it/s", "held-out loss", "digits-frechet"]
    assert [row[0] for row in rows] == ["uniform", "other"]
    assert rows[0][-2:] == ["1.000", "baseline"]
    assert rows[1][-2:] == [f"{(1 / 2 + 2 / 3) / 2:.3f}", "better"]
    assert rows[1][4] == "1.5 ± 0.5"
    assert all(len(row) == len(headings) for row in rows)


def test_without_a_distance_there_is_no_column_for_it():
    headings, rows = table_rows([measured("uniform", 0, None), measured("other", 0, None)])
    assert "digits-frechet" not in headings
    assert all(len(row) == len(headings) for row in rows)


@pytest.mark.parametrize("columns", [80, None])
def test_the_printed_table_shows_every_sampler_and_number(columns, capsys, monkeypatch):
    """In a narrow terminal cells go on in the next line, but nothing is cut off."""
    if columns:
        monkeypatch.setattr("noisewise.study.table.Console", lambda: Console(width=columns, force_terminal=True, no_color=True))
    long = "adaptive:estimator=lookahead,target=(minsnr),correction=none"
    results = [measured(name, seed, 1.25 + seed) for seed in range(2) for name in ("uniform", long)]
    print_table(results)
    said = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "…" not in said
    first = "".join(line.split("│")[1].strip() for line in said.splitlines() if line.startswith("│"))
    assert first == "uniform" + long
    assert {"1.75", "50.0", "100", "baseline", "unclear"} <= set(re.findall(r"[\w.]+", said))
    assert "every seed agrees" in re.sub(r"\s+", " ", said)
    assert "uniform" in explanation(results)


def test_samples_stay_out_of_the_row():
    row = measured("uniform", 3, 1.0).row()
    assert "samples" not in row
    assert (row["sampler"], row["seed"], row["distance"]) == ("uniform", 3, 1.0)
    assert not any(isinstance(value, torch.Tensor) for value in row.values())
