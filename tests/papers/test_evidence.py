"""What the pages say of runs whose answers are known."""

import pytest

from noisewise.papers.arxiv_2411_09998 import TABLE_1, TABLE_2, fig1
from noisewise.papers.evidence import Published, curves, distances, ends, ordinal, published_time, relative_time, value_at
from tests.study.made import curve, planted

PAPER = Published(
    "0.2M,0.4M,0.6M",
    {"DDPM": ("uniform", "8.0 6.0 4.00"), "Ours": ("minsnr", "7.0 5.0 3.00")},
    lowest=True,
)


@pytest.fixture
def folder(tmp_path):
    """Two methods and two seeds: uniform gets worse at its end, minsnr takes 1.5 times as long."""
    made = {}
    for seed in (0, 1):
        made["linear", "uniform", seed] = curve(9.0, 6.0 + seed, 8.0, steps=90, seconds=10)
        made["linear", "minsnr", seed] = curve(9.0, 9.0, 3.0 * (1 + seed), steps=90, seconds=15)
    planted(tmp_path, made)
    return tmp_path


def test_the_lowest_so_far_is_shown_where_the_paper_shows_it(folder):
    row = distances(folder, PAPER, "").tables[0].rows[0]
    assert row == ["DDPM (uniform)", "8.0", "6.0", "4.00", "9.00", "6.50", "6.50", "1.00", "1.00 / 1.00", "1.00 / 1.00"]
    plain = Published(PAPER.columns, PAPER.rows)
    assert distances(folder, plain, "").tables[0].rows[0][4:7] == ["9.00", "6.50", "8.00"]


def test_ratios_are_to_the_baseline_with_the_same_seed(folder):
    rows = distances(folder, PAPER, "").tables[0].rows
    assert rows[1][-3:] == ["0.75", f"{3 / 6:.2f} / {6 / 7:.2f}", f"{3 / 8:.2f} / {6 / 8:.2f}"]  # the lowest, and the last
    said = ends(folder, PAPER, "minsnr")
    assert all(part in said for part in ("0.65", "paper 0.75", "1st of 2"))


def test_a_method_that_has_not_run_is_a_dash(folder):
    more = Published(PAPER.columns, {**PAPER.rows, "P2": ("p2", "1 2 3")}, lowest=True)
    assert distances(folder, more, "").tables[0].rows[2][4:7] == ["–", "–", "–"]
    assert "not finished" in ends(folder, more, "p2")


def test_one_day_is_the_whole_run_of_the_baseline(folder):
    found = curves(folder)
    assert found.days("uniform")[0][-1] == 1
    assert all(days == pytest.approx([0.5, 1.0, 1.5]) for days in found.days("minsnr").values())
    section = relative_time(folder, {"uniform": "baseline", "minsnr": "ours", "p2": "missing"}, "")
    baseline, ours, missing = section.tables[0].rows
    assert baseline[1] == "1.00"
    assert (ours[1], ours[2]) == ("1.50", "4.50")
    assert (ours[4], ours[5]) == ("9.00", f"{9 / 6:.2f} / {9 / 7:.2f}")  # by 1D it had made two thirds of its steps
    assert set(missing[1:]) == {"–"}
    assert [line.points[-1].x for line in section.charts[0].lines] == pytest.approx([1.0, 1.5])


def test_there_is_no_value_before_the_first_evaluation_and_a_straight_line_between_two():
    assert value_at([0.5, 1.0], [2.0, 1.0], 0.4) is None
    assert value_at([0.5, 1.5], [2.0, 1.0], 1.0) == 1.5
    assert value_at([0.5, 0.9], [2.0, 1.0], 1.0) == 1.0
    assert value_at([0.5, 1.0], [2.0, float("nan")], 1.0) is None


def test_the_papers_curve_ends_at_its_own_time():
    chart = published_time(TABLE_1["linear"], {"Adaptive": 1.5}, "")
    last = {line.method.name: (line.points[-1].x, line.points[-1].y) for line in chart.lines}
    assert last["DDPM"] == (1.0, 3.19)
    assert last["Adaptive"] == (1.5, 2.94)
    assert TABLE_2.at == pytest.approx([1 / 3, 1])


@pytest.mark.parametrize("others", [{}, {("linear", "minsnr", 0): curve(9.0, 8.0, 3.0)}], ids=["none", "others"])
def test_no_finished_run_of_the_baseline_is_an_error_that_names_the_folder(others, tmp_path):
    planted(tmp_path, others, failures={("linear", "uniform", 0): "no memory"})
    with pytest.raises(RuntimeError, match=r"no run of uniform in .* has finished; their logs"):
        distances(tmp_path, PAPER, "")


def test_figure_1_says_so_if_the_papers_method_has_not_finished(tmp_path):
    planted(tmp_path / "linear", {("linear", "uniform", 0): curve(9.0, 8.0, 7.0)})
    assert fig1(tmp_path)[0] == "paper_cifar10 has not finished"


@pytest.mark.parametrize(("place", "word"), [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (21, "21st")])
def test_places_have_their_endings(place, word):
    assert ordinal(place) == word
