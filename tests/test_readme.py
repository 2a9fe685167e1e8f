"""The README's loop runs, and its numbers are those of the result files."""

import json
import math
import re
import statistics
from functools import cache
from pathlib import Path

import torch
from torch import nn

from noisewise.analysis import ANALYSES
from noisewise.commands.cli import COMMANDS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def rows(name):
    return [json.loads(line) for line in (ROOT / "benchmarks" / "results" / name).read_text().splitlines()]


def trained_by_the_loop(spec):
    """The weights of a model after the loop of the README with this spec in it."""
    (code,) = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert code.count('"adaptive"') == 1

    class Model(nn.Linear):
        def forward(self, x, time):
            return super().forward(x)

    torch.manual_seed(0)
    model = Model(3, 3)
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loader": torch.randn(5, 8, 3).unbind()}
    exec(code.replace('"adaptive"', f'"{spec}"'), names)
    assert names["sampler"].step == 5
    return model.weight.detach()


def test_the_loop_trains_with_every_method_that_it_names():
    """Each in its own way: a weighting that the loop left out would go unnoticed otherwise."""
    others = re.search(r"Any other method is another word in the same loop: (.*?)\. ", README, re.DOTALL)[1]
    specs = ["adaptive", *re.findall(r'`"([^"]+)"`', others)]
    assert len(specs) == 4
    bare = [term for spec in specs for term in spec.split("+") if "+" in spec]
    found = [trained_by_the_loop(spec) for spec in (*specs, *bare)]
    assert all(not torch.equal(a, b) for k, a in enumerate(found) for b in found[:k])


def test_the_costs_are_those_measured():
    measured = {row["sampler"]: row for row in rows("step_cost.jsonl")}
    claims = re.findall(r"^\| `([^`]+)`[^|\n]*(?:\\\|[^|\n]*)*\| ([\d.]+)× \(([\d.]+) to ([\d.]+)\) \|$", README, re.MULTILINE)
    names = {
        "adaptive+none": "adaptive",
        "adaptive+minsnr": "adaptive+minsnr",
        "adaptive:estimator=lookahead": "lookahead",
        "paper_cifar10": "paper_cifar10",
    }
    assert {spec for spec, *_ in claims} == set(names)
    for spec, *numbers in claims:
        row = measured[names[spec]]
        assert [float(number) for number in numbers] == [round(value, 3) for value in (row["ratio"], *row["range"])]


def test_the_cost_of_the_default_on_the_fast_path_is_that_measured():
    (ratio,) = [row["ratio"] for row in rows("cifar10-v1-method-cost.jsonl") if row["spec"] == "adaptive:floor=0.35"]
    link = r"\(\[all methods\]\(benchmarks/results/cifar10-v1-method-cost.jsonl\)\)"
    (claim,) = re.findall(rf"and `adaptive` ([\d.]+) times with the smaller one {link}", " ".join(README.split()))
    assert claim == f"{ratio:.2f}"
    assert f"a step costs {ratio:.3f} times uniform's" in README
    assert f"it was {ratio:.3f} times with the small network" in (ROOT / "docs" / "speed.md").read_text()
    assert f"A step takes {ratio:.3f} times uniform's time" in (ROOT / "docs" / "results.md").read_text()
    others = {row["spec"]: row["ratio"] for row in rows("cifar10-v1-method-cost.jsonl")}
    shown = re.findall(r"([\d.]+) times for `(paper_cifar10|gradient_variance)`", (ROOT / "docs" / "speed.md").read_text())
    assert shown == [(f"{others[spec]:.2f}", spec) for spec in ("paper_cifar10", "gradient_variance")]


def confirmed():
    """The last row of every run of the confirmation on CIFAR-10, by process, method and seed."""
    found = {}
    for row in rows("cifar10-v1-confirmation.jsonl"):
        if row["share"] == 1:
            found[row["process"].partition(":")[0], row["sampler"].replace(":floor=0.35", ""), row["seed"]] = row
    return found


def test_the_summary_of_the_confirmation_is_that_of_the_rows():
    page, last = (ROOT / "docs" / "results.md").read_text(), confirmed()
    distance = {run: row["distance"] for run, row in last.items()}

    def over(other):
        mine = [run for run in distance if run[1] == "adaptive"]
        pairs = [(distance[run], distance[run[0], other, run[2]]) for run in mine if (run[0], other, run[2]) in distance]
        return [one / another for one, another in pairs]

    assert f"The default has {min(over('uniform')):.2f} to {max(over('uniform')):.2f} times uniform's FID" in page
    weight = over("minsnr:gamma=5")
    assert f"It is {min(weight):.2f} to {max(weight):.2f} times that of Min-SNR's weight alone" in page
    assert max(weight + over("lognormal")) < 1, "the lowest of the four wherever all were run"
    gains = {
        process: sorted(
            round(100 * (1 - distance[run] / distance[process, "uniform", run[2]]))
            for run in distance
            if run[:2] == (process, "lognormal")
        )
        for process in ("linear", "quadratic", "cosine", "edm", "flow")
    }
    shown = {process: " to ".join(map(str, found)) + " %" for process, found in gains.items()}
    assert (
        f"which gains {shown['linear']} on the linear schedule, {shown['quadratic']} on the quadratic one, "
        f"{shown['edm']} on EDM, {shown['flow']} on flow, and {shown['cosine']} on the cosine one." in page
    )
    assert (len(over("uniform")), max(over("uniform")) < 1) == (12, True)
    assert "all twelve runs agree" in page
    assert (len(weight), "Against Min-SNR's weight all nine do" in page) == (9, True)
    margins = {}
    for process, spec, seed in distance:
        if spec == "minsnr:gamma=5":
            margin = 1 - distance[process, "adaptive", seed] / distance[process, spec, seed]
            margins.setdefault(process, []).append(round(100 * margin))
    known = {process: (min(found), max(found)) for process, found in margins.items()}
    assert known == {"linear": (12, 14), "cosine": (4, 4), "quadratic": (7, 8), "edm": (5, 5), "flow": (6, 6)}
    assert "the margin is 4 to 5 % on cosine and EDM, 6 to 8 % on quadratic and flow, 12 to 14 % on linear" in page
    least = {run: statistics.fmean(row["held_out"][:5]) for run, row in last.items()}
    ratios = [100 * (least[run] / least[run[0], "uniform", run[2]] - 1) for run in least if run[1] == "adaptive"]
    assert f"(u below 0.1) ends {min(ratios):.0f} to {max(ratios):.0f} % above uniform's" in page


@cache
def field_ends():
    """The last rows of the field by method and seed."""
    return {(row["method"], row["seed"]): row for row in rows("cifar10-v1-field.jsonl") if row["share"] == 1}


def in_both(name):
    """The FID of a method over uniform's, seed 0 and seed 1."""
    last = field_ends()
    return [f"{last[name, seed]['distance'] / last['uniform', seed]['distance']:.2f}" for seed in (0, 1)]


def page(name):
    return " ".join((ROOT / name).read_text().split())


def tail(row):
    """The held-out loss in the last tenth of the noise levels."""
    return statistics.fmean(row["held_out"][45:])


def test_what_is_said_of_the_published_method_is_that_of_the_rows():
    last = field_ends()
    published, repaired = " and ".join(in_both("adaptive-paper")), " and ".join(in_both("adaptive-repaired"))
    pairs = [(last["adaptive-paper", seed], last["uniform", seed]) for seed in (0, 1)]
    less = " and ".join(f"{100 * (1 - one['vlb'] / uniform['vlb']):.1f}" for one, uniform in pairs)
    assert f"{published} times uniform's FID in two runs of the smaller network" in " ".join(README.split())
    assert f"**The published method** has {published} times uniform's FID here" in page("docs/results.md")
    adaptive, card = page("docs/adaptive.md"), page("docs/methods/paper_cifar10.md")
    assert f"has {published} times uniform's FID on CIFAR-10 (linear, 10,000 steps, two seeds)" in adaptive
    assert f"ends {less} % below uniform's" in adaptive
    assert f"it has {repaired}." in adaptive
    assert f"the VLB ended {less} % below uniform's and FID at {published} times uniform's" in card
    assert f"at {repaired} times" in card


def test_what_is_said_of_the_controls_is_that_of_the_rows():
    last = field_ends()
    fixed, together = (
        f"{last[spec, 1]['distance'] / last['uniform', 1]['distance']:.2f}"
        for spec in ("beta:a=0.72,b=0.85", "paper_cifar10:policy=global")
    )
    results, record = page("docs/results.md"), page("benchmarks/cifar10.md")
    assert f"has {fixed} times uniform's FID with seed 1 and nothing learned" in results
    assert f"the same method with one density for all images {together}." in results
    assert f"a fixed Beta density, that of its mean, has {fixed} times uniform's FID with the second seed" in page(
        "docs/adaptive.md"
    )
    alike = in_both("adaptive-paper")[1]
    assert f"the published method has {alike}, with one density for all images {together}, and the fixed density" in record
    assert f"nothing learned at all, {fixed} (predicted" in record


def test_what_is_said_of_every_method_is_that_of_the_rows():
    last, results, readme = field_ends(), page("docs/results.md"), " ".join(README.split())
    assert "`loss_moment` and `gradient_variance` were worse still" in readme
    for seed in (0, 1):
        uniform = last["uniform", seed]
        for name in ("adaptive-paper", "loss-moment", "gradient-variance"):
            assert last[name, seed]["vlb"] < uniform["vlb"]
            assert last[name, seed]["loss"] < uniform["loss"], "as the page says of the three"
            assert last[name, seed]["distance"] >= last["adaptive-paper", seed]["distance"]
        lowest = min(row["vlb"] for (_, one), row in last.items() if one == seed)
        assert last["gradient-variance", seed]["vlb"] == lowest, "as its card says"
    named = {name: " and ".join(in_both(name)) for name, seed in last if seed == 0}
    assert f"**SpeeD** as released ({named['speed-released']})" in results
    assert f"with its τ from the schedule ({named['speed-derived']})" in results
    assert f"without importance weights ({named['loss-weighted']}) is behind" in results
    assert f"`loss_adaptive` ({named['loss-log-snr']})" in results
    assert f"it had {named['loss-log-snr']} times uniform's FID" in page("docs/methods/loss_adaptive.md")
    moment, variance = page("docs/methods/loss_moment.md"), page("docs/methods/gradient_variance.md")
    assert f"it had {named['loss-moment']} times uniform's FID" in moment
    for seed in (0, 1):
        assert f"{last['gradient-variance', seed]['distance']:.1f} against {last['uniform', seed]['distance']:.1f}" in variance
        drawn = statistics.fmean(last["loss-moment", seed]["density_by_level"][45:])
        assert f"{drawn:.2f} times as often as uniform, and with the weights that this needs" in moment
        assert f"share of a batch fell to {last['loss-moment', seed]['effective_share']:.2f}." in moment
    ends = {run[2]: row["distance"] for run, row in confirmed().items() if run[:2] == ("linear", "uniform")}
    ends |= {seed: last["uniform", seed]["distance"] for seed in (0, 1)}
    assert len(ends) == 4
    assert f"uniform's own last FIDs over four seeds are {min(ends.values()):.1f} to {max(ends.values()):.1f}" in results
    *_, targets = cells_of(between((ROOT / "benchmarks" / "cifar10.md").read_text(), "CIFAR-10 field targets"))
    assert f"(Spearman's rho {targets[-1]}); with P2's weighted mean of the same losses it is {targets[4]}" in results


def test_what_is_said_of_speed_is_that_of_the_rows():
    last, card = field_ends(), page("docs/methods/speed.md")
    released, derived = (" and ".join(in_both(f"speed-{name}")) for name in ("released", "derived"))
    assert f"{released} times its FID as released, {derived} times with τ from the schedule" in card
    tails = [tail(last[name, s]) / tail(last["uniform", s]) for name in ("speed-derived", "speed-released") for s in (0, 1)]
    assert f"the loss in their last tenth ended {min(tails):.1f} to {max(tails):.1f} times uniform's" in card


def test_the_least_noise_goes_with_fid_as_the_pages_say():
    """Over the runs of the field without importance weights: how much the first tenth of u counts, and FID."""
    runs = {}
    for row in rows("cifar10-v1-field.jsonl"):
        runs.setdefault((row["method"], row["seed"]), {})[row["share"]] = row
    found = []
    for (_, seed), run in runs.items():
        if 1 in run and run[1]["effective_share"] > 0.99:
            counted = statistics.fmean(statistics.fmean(row["objective_by_level"][:5]) for row in run.values())
            found.append((counted, run[1]["distance"] / runs["uniform", seed][1]["distance"]))
    assert len(found) == 24
    record = page("benchmarks/cifar10.md")
    assert "Over all 24 runs without importance weights" in record
    all_of_them, upwards = (rank_correlation([one for one in found if one[0] > least]) for least in (0, 0.2))
    assert f"rho of the two is {all_of_them:.2f}; from Min-SNR's 0.22 upwards it is {upwards:.2f}." in record
    assert f"Over the runs without importance weights (full points) rho is {all_of_them:.2f}." in page("docs/results.md")


def rank_correlation(pairs):
    columns = []
    for column in zip(*pairs, strict=True):
        ordered = sorted(round(one, 6) for one in column)
        columns.append([statistics.fmean(k for k, one in enumerate(ordered) if one == round(each, 6)) for each in column])
    return statistics.correlation(*columns)


def test_the_steps_to_uniforms_last_fid_are_those_of_the_table():
    """On the page on adaptive, on that of results, and in what the README says of EDM."""
    shares = {cells[0]: cells[-1] for cells in cells_of(between(README, "quality"))[1:]}
    half = [process for process, cell in shares.items() if all(int(one) <= 50 for one in re.findall(r"\d+", cell))]
    assert half == ["linear", "cosine", "quadratic", "flow"]
    assert [shares[process].count("/") for process in (*half, "EDM")] == [1, 2, 2, 1, 1]
    low, high = sorted(re.findall(r"\d+", shares["EDM"]))
    adaptive, results = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("adaptive", "results"))
    said = "half of uniform's steps or less on linear, cosine, quadratic and flow"
    assert f"{said}, and after {low} to {high} % on EDM (two seeds each, three on cosine and quadratic)" in adaptive
    assert f"on all processes but EDM, where it needs {low} to {high} %." in results
    assert "on EDM it saves less" in README


def test_what_is_said_of_the_larger_network_is_that_of_the_rows():
    results, adaptive, card, record = (
        " ".join((ROOT / name).read_text().split())
        for name in ("docs/results.md", "docs/adaptive.md", "docs/weightings/minsnr.md", "benchmarks/cifar10.md")
    )
    measured = {(row["sampler"], row["share"]): row for row in rows("cifar10-v1-paper.jsonl")}
    assert {row["seed"] for row in measured.values()} == {2}, "one seed is what the pages say"
    fid = {run: row["distance"] for run, row in measured.items()}
    uniform, weight, default = (measured[spec, 1.0]["headline"] for spec in ("uniform", "minsnr:gamma=5", "adaptive"))
    readme = " ".join(README.split())
    assert f"it has FID {default:.1f} of 50,000 images where Min-SNR has {weight:.1f} and uniform {uniform:.1f}" in readme
    assert f"The default's FID-50k is {default / uniform:.2f} times uniform's" in results
    share = (uniform - weight) / (uniform - default)
    assert 0.18 < share < 0.23
    assert "has a fifth of it in this run" in results
    assert "a fifth of it with [one of 35.7 M]" in card
    (steps,) = [
        cells[6] for cells in cells_of(between((ROOT / "docs/results.md").read_text(), "larger")) if "adaptive" in cells[0]
    ]
    assert f"uniform's last FID of 5,000 images after {steps} of the steps" in readme
    assert f"it needs {steps} of uniform's steps" in results
    assert f"and 15,000 steps it was {steps} (linear, one seed, other settings of training)" in adaptive
    lead, other = (
        [f"{fid[spec, at] / fid['uniform', at]:.2f}" for at in (0.5, 0.75, 1.0)] for spec in ("adaptive", "minsnr:gamma=5")
    )
    assert f"from {lead[0]} times uniform's FID at half of the steps to {lead[2]} at the end" in adaptive
    assert f"nearly goes ({other[0]} and {other[2]})" in adaptive
    assert f"({other[0]} at half, {other[1]}, {other[2]} of FID-5k), that of the default less ({', '.join(lead)})" in record
    bias = sorted(fid[spec, 1.0] - measured[spec, 1.0]["headline"] for spec in ("uniform", "minsnr:gamma=5", "adaptive"))
    assert f"by the same amount for all three**, {bias[0]:.2f} to {bias[-1]:.2f}." in record


def between(page, table):
    return page.partition(f"<!-- table: {table} -->")[2].partition("<!-- end -->")[0]


def cells_of(table):
    lines = [line for line in table.strip().splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_demo_figures_are_those_of_the_file():
    found = {(row["sampler"], row["seed"]): row["distance"] for row in rows("demo_digits.jsonl")}
    assert len(found) == 6
    for sampler, place in (("adaptive", r"`adaptive` were at ([\d.]+) times"), ("minsnr", r"Min-SNR at ([\d.]+),")):
        ratios = [found[sampler, seed] / found["uniform", seed] for seed in (0, 1)]
        (claim,) = re.findall(place, README)
        assert float(claim) == round(statistics.geometric_mean(ratios), 2)
        assert max(ratios) < 1


def test_the_demo_was_one_comparison_of_whole_runs_at_equal_time():
    found = rows("demo_digits.jsonl")
    (claim,) = re.findall(r"after (\d+) s each", README)
    assert {row["budget"] for row in found} == {f"{claim}s"}
    assert len({json.dumps([row["environment"], row["images"], row["evaluate_at"]]) for row in found}) == 1
    same = [{k: v for k, v in row["config"].items() if k not in ("sampler", "seed", "out")} for row in found]
    assert all(config == same[0] for config in same)
    for row in found:
        assert (row["status"], row["curve"][-1]["share"], row["metric"]) == ("finished", 1.0, "digits-frechet")
        assert row["curve"][-1]["distance"] == row["distance"]
        assert math.isclose(row["loss"], statistics.fmean(row["held_out"]))
        assert abs(row["seconds"] - float(claim)) < 0.5


def test_no_result_file_names_a_place_on_somebodys_machine():
    for path in (ROOT / "benchmarks" / "results").iterdir():
        assert not re.search(r"[\"' ,]/(home|root|work|tmp|Users)/", path.read_text()), path.name


def test_the_commands_are_those_of_the_command_line():
    block = README.partition("## With our trainer")[2].partition("```sh\n")[2].partition("```")[0]
    used = [line.split()[1] for line in block.splitlines()]
    assert set(used) == set(COMMANDS) - {"encode"}
    (analyze,) = [line for line in block.splitlines() if line.startswith("noisewise analyze")]
    assert set(re.findall(r"[a-z]+", analyze.partition("#")[2])) - {"or"} | {analyze.split()[2]} == set(ANALYSES)
