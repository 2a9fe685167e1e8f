"""Numbers in the pages on training, FID, comparing and analysing are those of the result files."""

import csv
import json
import re
from pathlib import Path
from statistics import fmean

import pytest

from noisewise.analysis import ANALYSES
from noisewise.analysis.cost_model import published
from noisewise.analysis.densities import median
from noisewise.analysis.increments import increments
from noisewise.spec import build_process
from noisewise.study.paired import holm, mean_ratio, paired_test
from noisewise.study.reach import Point, first_reached

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def rows(name):
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def numbers(row):
    return {key: number(value) for key, value in row.items()}


def number(text):
    try:
        return float(text)
    except ValueError:
        return text


def analysis(name):
    with (RESULTS / f"analysis_{name}.csv").open() as file:
        return [numbers(row) for row in csv.DictReader(file)]


def section(page, title):
    """The text of a section, on one line."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)
    return " ".join(found[1].split())


def test_the_sanity_figures_are_those_measured():
    page = (ROOT / "docs" / "fid.md").read_text()
    (row,) = rows("fid_sanity.jsonl")
    assert row["device"] in page
    for field, digits in (("first_tenth_against_train", 4), ("test_against_train", 4), ("images_per_s", 0)):
        assert f"| {row['float32'][field]:.{digits}f} | {row['tf32'][field]:.{digits}f} |" in page
    assert all(abs(value) < 0.05 for value in row["minus_expected"].values())


def test_the_cost_of_the_presets_is_that_measured():
    table = (ROOT / "docs" / "training.md").read_text().partition("| preset | batch |")[2].partition("\n\n")[0]
    claims = re.findall(r"^\| `([\w-]+)` \| (\d+) \| ([\d.]+) \| ([\d.]+) GiB \|$", table, re.MULTILINE)
    measured = {row["preset"]: row for row in rows("preset_cost.jsonl")}
    assert {name for name, *_ in claims} == set(measured) - {"digits"}
    for name, batch, speed, memory in claims:
        row = measured[name]
        assert (int(batch), float(speed)) == (row["batch"], round(1 / row["seconds_per_step"], 2))
        assert float(memory) == round(row["gpu_memory_gib"], 1)


def test_what_a_constant_average_did_is_that_measured():
    page = (ROOT / "docs" / "training.md").read_text()
    found = {(row["sampler"], row["weights"]): row for row in rows("ema_start.jsonl")}
    ema, last = (found["uniform", weights]["distance"] for weights in ("ema", "model"))
    assert f"FID-5k was {ema:.0f}, against {last:.0f} for the last" in page
    assert found["uniform", "ema"]["config"]["ema"] == {"kind": "constant", "decay": 0.9995, "ramp": False, "std": 0.1}
    assert found["uniform", "ema"]["steps"] == 3200
    assert round(0.9995**3200, 1) == 0.2


# Comparing: the demo


def demo():
    """Sampler to its runs in the order of seeds."""
    found = {}
    for row in rows("demo_digits.jsonl"):
        found.setdefault(row["sampler"], []).append(row)
    return {sampler: sorted(runs, key=lambda run: run["seed"]) for sampler, runs in found.items()}


def test_the_table_of_the_demo_is_that_of_its_file():
    page, runs = section("comparing", "How to read the table"), demo()
    ends = {sampler: [run["distance"] for run in found] for sampler, found in runs.items()}
    others = [sampler for sampler in runs if sampler != "uniform"]
    adjusted = dict(zip(others, holm([paired_test(ends[name], ends["uniform"]) for name in others]), strict=True))
    for sampler, found in runs.items():
        curves = [[Point(one["step"], one["seconds"], one["distance"]) for one in run["curve"]] for run in found]
        there = [first_reached(curve, end).seconds for curve, end in zip(curves, ends["uniform"], strict=True)]
        sooner = mean_ratio([run["seconds"] for run in runs["uniform"]], there)
        spread = f"{fmean(ends[sampler]):.4g} ± {(max(ends[sampler]) - min(ends[sampler])) / 2:.2g}"
        ratio, p = mean_ratio(ends[sampler], ends["uniform"]), adjusted.get(sampler)
        shown = f"| {sampler} | {spread} | {ratio:.3f} | {fmean(there):.1f} ({sooner:.2f}×) | {f'{p:.3f} ' if p else ''}|"
        assert shown in page
    alone = {name: paired_test(ends[name], ends["uniform"]) for name in others}
    assert f"the larger p before the correction, {alone['adaptive']:.3f} against {alone['minsnr']:.3f}," in page
    assert f"the same {adjusted['minsnr']:.3f}, twice the smaller" in page
    assert f"{adjusted['minsnr']:.3f}" == f"{adjusted['adaptive']:.3f}" == f"{2 * alone['minsnr']:.3f}"
    each = {name: [mine / theirs for mine, theirs in zip(ends[name], ends["uniform"], strict=True)] for name in others}
    assert all(mine < weight for mine, weight in zip(each["adaptive"], each["minsnr"], strict=True)), "more with both seeds"
    assert "its two ratios, {:.3f} and {:.3f}, lie farther apart".format(*sorted(each["adaptive"])) in page
    assert "lie farther apart than {:.3f} and {:.3f} do.".format(*sorted(each["minsnr"])) in page
    assert "Two ratios of 0.837 and 0.848, a smaller gain, would have p = 0.024 before" in page
    assert f"{paired_test([0.837, 0.848], [1.0, 1.0]):.3f}" == "0.024"
    assert len(runs["uniform"]) == 2
    assert all((run["budget"], run["images"]) == ("25s", 500) for found in runs.values() for run in found)


def test_what_two_seeds_are_asked_for_is_the_quantile_of_t():
    effect, half = 12.7, 1.0  # in units of half the difference between the two
    assert "12.7 times half the difference" in section("comparing", "How to read the table")
    low, high = 10 ** ((effect - half) / 100), 10 ** ((effect + half) / 100)
    assert paired_test([low, high], [1.0, 1.0]) == pytest.approx(0.05, abs=0.0005)


# Analysing


def test_every_picture_of_an_analysis_has_its_numbers_here():
    names = {path.stem for path in RESULTS.glob("analysis_*.csv")}
    assert names == {f"analysis_{name}" for name in ANALYSES} - {"analysis_increments"}  # which is computed below


def test_what_is_said_of_gradients_is_in_the_file():
    page, found = section("analyzing", "gradients"), analysis("gradients")
    first, last = ({row["u"]: row for row in found if row["step"] == step} for step in (0, 800))
    variance = [row["variance"] for row in first.values()]
    assert f"within {max(variance) / min(variance):.2f} times" in page
    low, high = (choose(last.values(), key=lambda row: row["variance"]) for choose in (min, max))
    assert f"{high['variance'] / low['variance']:.0f} times its smallest value, which lies at u = {low['u']:g}" in page
    assert high["u"] == 0.025
    assert f"from {first[0.025]['variance']:.2f} to {last[0.025]['variance']:.1f} while the loss falls" in page
    assert f"falls from {first[0.025]['loss']:.2f} to {last[0.025]['loss']:.2f}" in page
    assert {row["method"] for row in found} == {"per_sample"}


def test_what_is_said_of_the_optimal_loss_is_in_the_file():
    page, found = section("analyzing", "optimal"), analysis("optimal")
    memorised = [row for row in found if row["memorised"] == "True"]
    others = [row for row in found if row["memorised"] != "True"]
    assert f"{len(memorised)} of {len(found)} levels, up to u = {memorised[-1]['u']:g}, are memorised" in page
    share = sum(row["reducible"] for row in others) / sum(row["held_out"] for row in others)
    assert f"at most {100 * share:.1f} % of the held-out loss" in page
    assert max(others, key=lambda row: row["reducible"]) == others[0]
    last = found[-1]
    assert f"at u = {last['u']:g} the loss is {last['held_out'] / last['loss']:.0f} times the optimal one" in page
    assert all(0.0004 < row["reducible"] < 0.0007 for row in found if row["u"] > 0.5)


def test_what_is_said_of_interdependence_is_in_the_file():
    page = section("analyzing", "interdependence")
    found = [row for row in analysis("interdependence") if row["kind"] == "stratum"]
    harmed = {}
    for step in (0, 200, 400):
        others = [row for row in found if row["step"] == step and row["trained_low"] != row["affected_low"]]
        assert len(others) == 90
        harmed[step] = fmean(row["change"] > 0 for row in others)
    assert harmed[0] == 0
    assert f"At step 200, {harmed[200]:.0%} of the pairs".replace("%", " %") in page
    assert f"at step 400 {harmed[400]:.0%}.".replace("%", " %") in page
    late = {(row["trained_low"], row["affected_low"]): row["relative_change"] for row in found if row["step"] == 400}
    assert f"make that of the noisiest tenth {1 + late[0, 0.9]:.0f} times as large" in page
    assert f"that of the least noise by {100 * late[0.9, 0]:.0f} % and lower their own by {-100 * late[0.9, 0.9]:.0f} %" in page
    assert f"lower their own loss by {-100 * late[0, 0]:.0f} %" in page


def test_what_is_said_of_densities_is_in_the_file():
    page, last = section("analyzing", "density"), {}
    for row in analysis("density"):
        last.setdefault(row["sampler"], {}).setdefault(row["step"], []).append(row)
    ends = {sampler: steps[max(steps)] for sampler, steps in last.items()}
    middle = {(name, key): median([row[key] for row in end]) for name, end in ends.items() for key in ("density", "objective")}
    assert f"draws lie below u = {middle['adaptive', 'density']:.3f}" in page
    assert f"half of its objective below {middle['adaptive', 'objective']:.3f}" in page
    assert f"a little, to {middle['minsnr', 'objective']:.3f}, the same" in page
    assert middle["adaptive", "objective"] == pytest.approx(middle["minsnr", "objective"], abs=5e-4)
    assert middle["minsnr", "density"] == pytest.approx(0.5)


def test_what_is_said_of_the_floor_is_in_the_file():
    page, found = section("analyzing", "ablate"), analysis("ablate")
    ratios = [row["ratio"] for row in found]
    assert max(ratios) < 1
    assert f"at {min(ratios):.2f} to {max(ratios):.2f} times" in page
    of_value = {value: [row["result"] for row in found if row["value"] == value] for value in (0, 0.2, 0.5)}
    means = [f"{fmean(results):.2f}" for results in of_value.values()]
    assert "a mean of {1} against {0} without a floor and {2} at 0.5".format(*means) in page
    assert all(without < usual < half for without, usual, half in zip(*of_value.values(), strict=True))
    assert max(map(fmean, of_value.values())) - min(map(fmean, of_value.values())) < abs(of_value[0.2][0] - of_value[0.2][1])


def test_what_is_said_of_the_predictor_is_in_the_file():
    page, found = section("analyzing", "predictor"), analysis("predictor")
    places = {(row["step"], row["selection"], row["size"]): row for row in found}

    def line(label, selection, size, field):
        cells = [f"{places[step, selection, size][field]:.2f}".replace("-", "−") for step in (0, 200, 400)]
        return f"| {label} | {' | '.join(cells)} |"

    assert line("levels by F-statistic (published), all samples", "f_statistic", 3, "few_pearson") in page
    assert line("evenly spaced levels, all samples", "grid", 3, "few_pearson") in page
    assert line("the reward: levels by F-statistic, one sample", "f_statistic", 3, "one_pearson") in page
    assert line("all levels, one sample", "all", 40, "one_pearson") in page
    assert line("reward against the gain that the sample caused", "credit", 3, "one_pearson") in page
    credit = [row for row in found if row["selection"] == "credit"]
    assert all(abs(row["one_pearson"]) < 2 / row["steps"] ** 0.5 for row in credit)
    assert {f"±{2 / row['steps'] ** 0.5:.2f} for {row['steps']:.0f} samples" for row in credit} == {"±0.41 for 24 samples"}
    assert "±0.41 for 24 samples" in page
    assert all(places[step, "f_statistic", 3]["few_pearson"] < places[step, "grid", 3]["few_pearson"] for step in (0, 200, 400))


def test_what_is_said_of_overhead_is_in_the_file():
    page, found = section("analyzing", "overhead"), analysis("overhead")
    assert len(found) == 28
    assert all(row["counted"] == pytest.approx(row["predicted"]) for row in found)
    for row in found:
        clock = f"{row['measured']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        if row["varied"] == "none":
            assert (row["parameters"], row["batch"], row["T"]) == (163985, 32, 300)
            assert f"| `{row['sampler']}` | {row['predicted']:.3f} | {clock} |" in page
        if row["sampler"] == "gradient_variance":
            assert row["measured"] > row["predicted"]
        if (row["sampler"], row["T"]) == ("paper_cifar10", 1000):
            assert f"the model says {row['predicted']:.3f} and the clock {row['measured']:.3f}" in page
    widest = max(found, key=lambda row: row["high"] - row["low"])
    assert widest["rounds"] == 5


def test_the_cost_of_the_published_method_is_that_of_its_formula():
    page = section("analyzing", "overhead")
    settings = {"steps": 1000, "batch": 128, "chosen": 3, "every": 40}
    batches = 2 * 3 + 2 * 1000 / 128
    assert (
        f"{batches:.1f} batches forward, {batches / 40:.2f} a step, and the formula gives **{published(**settings):.2f}**"
        in page
    )
    (measured,) = [row["ratio"] for row in rows("step_cost.jsonl") if row["sampler"] == "paper_cifar10"]
    assert f"an H200 measured {measured:.2f}" in page
    assert published(**settings, step=1.32) == pytest.approx(1.41, abs=0.005)
    assert f"{published(**settings, step=1):.2f} if it costs a single one" in page


def test_the_areas_of_schedules_are_those_computed():
    page = section("analyzing", "increments")
    for schedule in ("linear", "cosine", "quadratic", "flow"):
        found = increments(build_process(schedule))
        shares = " | ".join(f"{100 * share:.1f} %" for share in found.shares().values())
        assert f"| {schedule} | {found.peak} | {found.tau} | {shares} |" in page
    assert increments(build_process("edm")).shares()["convergence"] == 0
