"""Ablations: specs with one setting changed, what is read off planted comparisons, and one that is really run."""

import csv

import pytest

import noisewise
from noisewise.analysis.ablate import SETTINGS, all_settings, draw, one_setting, rows_of, sentences, with_setting
from noisewise.commands.cli import main
from noisewise.processes import DDPM
from noisewise.study.outcome import Plan
from tests.study.made import compared, curve


@pytest.mark.parametrize(
    ("spec", "setting", "value", "expected"),
    [
        ("adaptive", "floor", "0.1", "adaptive:floor=0.1"),
        ("adaptive:floor=0.5,every=20", "floor", "0", "adaptive:floor=0,every=20"),
        ("adaptive+minsnr:gamma=5", "every", "10", "adaptive:every=10+minsnr:gamma=5"),
        ("minsnr+adaptive", "every", "10", "minsnr+adaptive:every=10"),
        ("adaptive", "target", "vlb:clip=5", "adaptive:target=(vlb:clip=5)"),
        ("adaptive", "target", "(vlb:clip=5)", "adaptive:target=(vlb:clip=5)"),
        ("mix:of=(speed:k=5),floor=0.1", "of", "speed:k=2", "mix:of=(speed:k=2),floor=0.1"),
    ],
)
def test_one_setting_is_changed_and_nothing_else(spec, setting, value, expected):
    assert with_setting(spec, setting, value) == expected
    noisewise.recipe(expected, DDPM.linear())


def test_a_changed_setting_reaches_the_sampler():
    samplers = [
        noisewise.recipe(change.spec, DDPM.linear()).sampler for change in one_setting("adaptive", "floor", ["0", "0.3"])
    ]
    assert [sampler.floor for sampler in samplers] == [0, 0.3]


def test_a_spec_without_a_sampler_has_no_setting_to_change():
    with pytest.raises(ValueError, match="names no sampler"):
        with_setting("minsnr", "gamma", "3")


def test_all_settings_of_the_paper_share_their_usual_run():
    changes = all_settings("adaptive:estimator=reinforce")
    assert list(dict.fromkeys(change.setting for change in changes)) == list(SETTINGS)
    usual = [change for change in changes if change.value == SETTINGS[change.setting].usual]
    assert len(usual) == len(SETTINGS)
    assert len({change.spec for change in usual}) == 1
    assert len({change.spec for change in changes}) == len(changes) - len(SETTINGS) + 1
    for change in changes:
        noisewise.recipe(change.spec, DDPM.linear())


def test_the_usual_values_are_the_defaults():
    written, plain = (
        noisewise.recipe(spec, DDPM.linear()).sampler
        for spec in (all_settings("adaptive:estimator=reinforce")[1].spec, "adaptive:estimator=reinforce")
    )
    for name in ("chosen", "every"):
        assert getattr(written.estimator, name) == getattr(plain.estimator, name)
    assert (written.floor, len(written.estimator.queue)) == (plain.floor, len(plain.estimator.queue))


def test_what_a_spec_gives_already_is_kept():
    changes = all_settings("adaptive:estimator=reinforce,floor=0.4+minsnr")
    assert {noisewise.recipe(c.spec, DDPM.linear()).sampler.floor for c in changes if c.setting == "queue"} == {0.4}
    assert not any("target" in change.spec for change in changes if change.setting != "target")


CHANGES = one_setting("adaptive", "floor", ["0", "0.2", "0.5"])


def planted_comparison(**settings):
    final = {
        "uniform": (6.0, 6.2),
        "adaptive:floor=0": (7.0, 6.6),
        "adaptive:floor=0.2": (5.0, 5.2),
        "adaptive:floor=0.5": (5.1, 5.9),
    }
    curves = {("linear", sampler, seed): curve(9.0, values[seed]) for sampler, values in final.items() for seed in (0, 1)}
    return compared(curves, **settings)


def test_rows_hold_the_result_of_each_seed_beside_the_baselines():
    rows = rows_of(CHANGES, planted_comparison())
    assert [(row["value"], row["seed"], row["result"], row["baseline"]) for row in rows[:3]] == [
        ("0", 0, 7.0, 6.0),
        ("0", 1, 6.6, 6.2),
        ("0.2", 0, 5.0, 6.0),
    ]
    assert rows[1]["ratio"] == pytest.approx(6.6 / 6.2)
    assert {row["metric"] for row in rows} == {"fid"}


def test_without_a_distance_the_held_out_loss_decides():
    rows = rows_of(CHANGES, planted_comparison(metric=None))
    assert rows[0]["metric"] == "held-out loss"
    assert rows[0]["result"] == pytest.approx(7.0)


def test_unfinished_runs_are_left_out():
    curves = {("linear", "uniform", 0): curve(6.0), ("linear", "adaptive:floor=0", 0): [(0.5, 500, 5.0, 1.0)]}
    made = compared({**curves, ("linear", "adaptive:floor=0.2", 1): curve(5.0)})
    (row,) = rows_of(CHANGES, made)
    assert (row["value"], row["seed"], row["baseline"], row["ratio"]) == ("0.2", 1, None, None)
    assert len(draw([row]).axes) == 1


def test_what_is_said_tells_a_clear_difference_from_one_within_the_seeds():
    rows = rows_of(CHANGES, planted_comparison())
    assert sentences(rows) == ["floor: lowest fid 5.1 (5 to 5.2) at 0.2, highest 6.8 (6.6 to 7) at 0"]
    assert "overlap with those at 0.5" in sentences([row for row in rows if row["value"] != "0"])[0]
    assert "the only value" in sentences([row for row in rows if row["value"] == "0"])[0]


def test_the_picture_has_a_panel_for_each_setting_with_the_baseline_as_a_band():
    changes = [*CHANGES, *one_setting("adaptive", "every", ["5"])]
    made = planted_comparison()
    more = compared({("linear", "adaptive:every=5", seed): curve(5.5) for seed in (0, 1)})
    made.outcomes.extend(more.outcomes)
    figure = draw(rows_of(changes, made))
    first, second = figure.axes
    assert [label.get_text() for label in first.get_xticklabels()] == ["0", "0.2", "0.5"]
    assert first.get_xlabel() == SETTINGS["floor"].label
    assert second.get_xlabel() == SETTINGS["every"].label
    band = first.patches[0].get_extents().transformed(first.transData.inverted())
    assert (band.y0, band.y1) == pytest.approx((6.0, 6.2))


def test_an_ablation_is_a_comparison_that_goes_on_where_it_was(tmp_path, capsys):
    small = ["--model.name", "dit", "--model.options", '{"patch": 4, "width": 16, "depth": 1, "heads": 2}', "--batch", "8"]
    command = ["analyze", "ablate", "--setting", "floor", "--values", "0,0.5", "--sampler", "adaptive", "--seeds", "1", *small]
    command += ["--budget", "3it", "--images", "4", "--turns", "3", "--formats", "png", "--out", str(tmp_path)]
    assert main(command) == 0
    plan = Plan.read(tmp_path / "ablate")
    assert (plan.baseline, plan.budget, len(plan.runs)) == ("uniform", "3it", 3)
    assert plan.command[:2] == ("analyze", "ablate")
    with (tmp_path / "ablate.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["value"], row["steps"]) for row in rows] == [("0", "3"), ("0.5", "3")]
    assert (tmp_path / "ablate.png").is_file()
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("ablate/runs/*/metrics.jsonl")}
    capsys.readouterr()
    assert main(command) == 0
    assert "floor: lowest" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in times} == times
