"""The files hold every number as it is, of every run."""

import csv
import json
from dataclasses import replace

import pytest

from noisewise.study.outcome import Failure, Plan, read_comparison
from noisewise.study.results import write_results
from noisewise.study.summary import summarise
from noisewise.training.options import plain
from tests.study.made import MACHINE, compared, curve, planted

THIRD = 20 / 3  # a number with all its digits
CURVES = {
    ("linear", "uniform", 0): curve(30, 25, 20, seconds=7 / 3),
    ("linear", "uniform", 1): curve(31, 26, 21),
    ("linear", "adaptive", 0): curve(20, 10, THIRD),
    ("linear", "adaptive", 1): curve(20, float("nan"), 10)[:2],
    ("linear", "minsnr", 0): curve(32, 24, 19),
    ("linear", "minsnr", 1): curve(32, 24, 19)[:1],
}
FAILURES = {
    ("linear", "adaptive", 1): Failure('it said:\n"no", twice', 700, "the last lines"),
    ("linear", "speed", 0): "never began",
}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return planted(tmp_path_factory.mktemp("comparison"), CURVES, failures=FAILURES)


def rows_of(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def lines_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def written(comparison):
    paths = write_results(comparison)
    assert [path.name for path in paths] == ["results.jsonl", "results.csv", "summary.csv"]
    assert {path.parent for path in paths} == {comparison.folder}
    return rows_of(paths[0]), lines_of(paths[1]), lines_of(paths[2])


def test_every_run_has_its_row_whatever_became_of_it(comparison):
    rows, _, _ = written(comparison)
    assert [(row["sampler"], row["seed"], row["status"]) for row in rows] == [
        ("uniform", 0, "finished"),
        ("uniform", 1, "finished"),
        ("adaptive", 0, "finished"),
        ("adaptive", 1, "failed"),
        ("minsnr", 0, "finished"),
        ("minsnr", 1, "unfinished"),
        ("speed", 0, "failed"),
    ]
    assert [row["failure"] for row in rows] == [None, None, None, 'it said:\n"no", twice', None, None, "never began"]
    assert all(list(row) == list(rows[0]) for row in rows)


def test_a_row_holds_all_that_is_known_of_a_run(comparison):
    row, outcome = written(comparison)[0][2], comparison.outcomes[2]
    final = outcome.final
    assert (row["process"], row["run"]) == ("linear", outcome.folder.name)
    assert (row["step"], row["seconds"], row["steps_per_second"]) == (1000, 10.0, 100.0)
    assert (row["metric"], row["distance"], row["loss"], row["vlb"]) == ("fid", THIRD, final.loss, final.vlb)
    assert row["held_out"] == final.held_out
    assert [point["distance"] for point in row["curve"]] == [20.0, 10.0, THIRD]
    assert [point["loss"] for point in row["curve"]] == [one.loss for one in outcome.evaluations]
    assert row["curve"][0]["picture"] == outcome.evaluations[0].picture
    plan = comparison.plan
    assert (row["baseline"], row["budget"], row["images"]) == (plan.baseline, plan.budget, plan.images)
    assert row["evaluate_at"] == list(plan.evaluate_at)
    assert row["config"] == plain(outcome.config)
    assert row["environment"] == MACHINE


def test_a_run_that_did_not_get_to_its_end_has_no_final_value(comparison):
    failed, unfinished, never = (written(comparison)[0][i] for i in (3, 5, 6))
    for row in (failed, unfinished, never):
        assert {row[name] for name in ("metric", "distance", "loss", "vlb", "held_out")} == {None}
    assert (failed["step"], len(failed["curve"])) == (667, 2)
    assert (unfinished["step"], unfinished["steps_per_second"]) == (333, pytest.approx(99.9))
    assert (never["step"], never["seconds"], never["steps_per_second"], never["curve"]) == (None, None, None, [])


def test_numbers_that_json_does_not_have_are_null(comparison):
    """`rows_of` fails on NaN."""
    rows, lines, _ = written(comparison)
    assert rows[3]["curve"][1]["distance"] is None
    assert rows[3]["curve"][1]["metric"] == "fid"
    assert [line["distance"] for line in lines if (line["sampler"], line["seed"]) == ("adaptive", "1")] == ["20.0", "nan"]


def test_each_evaluation_is_a_line_and_floats_read_back_as_they_were(comparison):
    _, lines, _ = written(comparison)
    assert len(lines) == 3 + 3 + 3 + 2 + 3 + 1 + 1
    found = [line for line in lines if (line["sampler"], line["seed"]) == ("uniform", "0")]
    expected = comparison.outcomes[0].evaluations
    for line, one in zip(found, expected, strict=True):
        assert (float(line["share"]), int(line["step"]), float(line["seconds"])) == (one.share, one.step, one.seconds)
        assert (line["metric"], float(line["distance"]), float(line["loss"])) == ("fid", one.distance, one.loss)
        assert float(line["vlb"]) == one.vlb
    assert lines[-1]["sampler"] == "speed"
    assert (lines[-1]["failure"], lines[-1]["step"], lines[-1]["distance"]) == ("never began", "", "")
    assert {line["failure"] for line in lines if line["sampler"] == "adaptive"} == {"", 'it said:\n"no", twice'}


def test_the_summary_is_flat_and_exact(comparison):
    _, _, lines = written(comparison)
    summaries = summarise(comparison)
    assert [line["sampler"] for line in lines] == ["uniform", "adaptive", "minsnr", "speed"]
    line, one = lines[1], summaries[1]
    assert (line["seeds"], line["failed"], line["unfinished"], line["baseline"]) == ("0", "1", "", "False")
    assert (float(line["distance"]), float(line["distance_half_range"])) == (THIRD, 0.0)
    assert float(lines[0]["distance"]) == 20.5
    assert float(lines[0]["distance_half_range"]) == 0.5
    assert (float(line["ratio"]), float(line["speedup_steps"])) == (one.ratio, one.speedup_steps)
    assert (line["verdict"], line["pairs"], line["reached"], line["reached_at_most"]) == ("one seed", "1", "0", "0")
    assert (lines[0]["seeds"], lines[0]["reached"], lines[0]["reached_at_most"]) == ("0 1", "0 1", "")
    assert (lines[3]["verdict"], lines[3]["distance"], lines[3]["ratio"]) == ("no finished run", "", "")


def test_a_headline_is_in_every_file(tmp_path):
    rows, lines, summaries = written(planted(tmp_path, {("linear", "uniform", 0): curve(30, THIRD)}, headline=500))
    assert [(row["headline_images"], row["headline"]) for row in rows] == [(500, THIRD / 2)]
    assert [(line["headline_images"], line["headline"]) for line in lines] == [("", ""), ("500", repr(THIRD / 2))]
    assert float(summaries[0]["headline"]) == THIRD / 2


def test_a_failure_that_was_overcome_is_not_reported(tmp_path):
    rows, _, _ = written(planted(tmp_path, {("linear", "uniform", 0): curve(3, 2)}, failures={("linear", "uniform", 0): "old"}))
    assert (rows[0]["status"], rows[0]["failure"]) == ("finished", None)


def test_writing_again_replaces_the_files_and_leaves_nothing_else(comparison):
    before = [path.read_text() for path in write_results(comparison)]
    names = {path.name for path in comparison.folder.iterdir()}
    fewer = replace(comparison, outcomes=comparison.outcomes[:2])
    assert [len(part) for part in written(fewer)] == [2, 6, 1]
    assert [path.read_text() for path in write_results(comparison)] == before
    assert {path.name for path in comparison.folder.iterdir()} == names
    assert names == {"runs", "comparison.json", "results.jsonl", "results.csv", "summary.csv"}


def test_a_kill_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    comparison = planted(tmp_path, CURVES)
    before = [path.read_text() for path in write_results(comparison)]

    def killed(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", killed)
    fewer = replace(comparison, outcomes=comparison.outcomes[:2])
    with pytest.raises(KeyboardInterrupt):
        write_results(fewer)
    after = [(comparison.folder / name).read_text() for name in ("results.jsonl", "results.csv", "summary.csv")]
    assert after == before


def test_a_comparison_of_which_nothing_has_begun_gives_empty_files(tmp_path):
    compared({}, folder=tmp_path).plan.write(tmp_path)
    assert Plan.read(tmp_path).runs == ()
    assert written(read_comparison(tmp_path)) == ([], [], [])
