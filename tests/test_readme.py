"""The README's loop runs, and its numbers are those of the result files."""

import json
import math
import re
import statistics
from pathlib import Path

import torch
from torch import nn

from noisewise.cli import COMMANDS
from noisewise.study.analysis import ANALYSES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def rows(name):
    return [json.loads(line) for line in (ROOT / "benchmarks" / "results" / name).read_text().splitlines()]


def test_the_loop_runs():
    (code,) = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)

    class Model(nn.Linear):
        def forward(self, x, time):
            return super().forward(x)

    torch.manual_seed(0)
    model = Model(3, 3)
    before = model.weight.detach().clone()
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loader": torch.randn(5, 8, 3).unbind()}
    exec(code, names)
    assert names["sampler"].step == 5
    assert not torch.equal(before, model.weight)


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
    assert f"it was {ratio:.3f} times with the small network" in (ROOT / "docs" / "speed.md").read_text()
    assert f"costs {ratio:.3f} times uniform's time per step" in (ROOT / "docs" / "results.md").read_text()
    others = {row["spec"]: row["ratio"] for row in rows("cifar10-v1-method-cost.jsonl")}
    shown = re.findall(r"([\d.]+) times for `(paper_cifar10|gradient_variance)`", (ROOT / "docs" / "speed.md").read_text())
    assert shown == [(f"{others[spec]:.2f}", spec) for spec in ("paper_cifar10", "gradient_variance")]


def test_the_summary_of_the_confirmation_is_that_of_the_record():
    record = (ROOT / "benchmarks" / "cifar10.md").read_text()
    table = between(record, "CIFAR-10 confirmation")
    ratios = [float(ratio) for cells in cells_of(table)[1:] if cells[1] == "`adaptive`" for ratio in cells[6].split(" / ")]
    page = (ROOT / "docs" / "results.md").read_text()
    assert f"the default has {min(ratios):.2f} to {max(ratios):.2f} times uniform's FID-5k" in page
    field = {cells[1]: cells for cells in cells_of(between(record, "CIFAR-10 field"))}
    assert f"the same with a smaller floor has {field['`adaptive:floor=0.2`'][7]} times (one seed)" in page


def test_the_steps_to_uniforms_last_fid_are_those_of_the_record():
    """In the README and on the page on adaptive, which have them in the same words."""
    record = (ROOT / "benchmarks" / "cifar10.md").read_text()
    confirmed = {
        cells[0]: cells[-1] for cells in cells_of(between(record, "CIFAR-10 confirmation")) if cells[1] == "`adaptive`"
    }
    assert {name for name, share in confirmed.items() if share == "≤ 50 %"} == {"cosine", "quadratic", "flow"}
    linear = {cells[1]: cells[-1] for cells in cells_of(between(record, "CIFAR-10 field"))}
    for text in (README, (ROOT / "docs" / "adaptive.md").read_text()):
        flat = " ".join(text.split())
        assert re.search(r"uniform's last FID after half of uniform's steps or less on (the )?cosine", flat)
        (claim,) = re.findall(r"after (\d+) % on EDM", flat)
        assert confirmed["EDM"] == f"{claim} %"
        (claim,) = re.findall(r"(?:the linear schedule after|the smaller floor after) (\d+) %", flat)
        assert linear["`adaptive:floor=0.2`"] == f"{claim} %"


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
