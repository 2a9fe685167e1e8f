"""The README's loop runs, and its numbers are those of the result files."""

import json
import re
import statistics
from pathlib import Path

import torch
from torch import nn

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
    names = {"adaptive": "adaptive", "adaptive:estimator=lookahead": "lookahead", "paper_cifar10": "paper_cifar10"}
    assert {spec for spec, *_ in claims} == set(names)
    for spec, *numbers in claims:
        row = measured[names[spec]]
        assert [float(number) for number in numbers] == [round(value, 3) for value in (row["ratio"], *row["range"])]


def test_the_digits_table_is_that_of_the_file():
    specs = {"uniform": "uniform", "minsnr": "minsnr", "adaptive": "adaptive:estimator=loss", "paper_cifar10": "paper_cifar10"}
    specs |= {"adaptive+minsnr": "adaptive:estimator=loss+minsnr"}
    specs |= {"adaptive:target=(minsnr),correction=none": "adaptive:estimator=loss,target=(minsnr),correction=none"}
    table = README.partition("| | linear | cosine | quadratic |")[2].partition("\n\n")[0]
    claims = re.findall(r"^\| `?([^`|]+?)`?(?: \([a-z ]+\))? \| (\S+) \| (\S+) \| (\S+) \|$", table, re.MULTILINE)
    claims = [claim for claim in claims if "---" not in claim[0]]
    assert {name for name, *_ in claims} == set(specs)
    for name, *numbers in claims:
        for schedule, number in zip(("linear", "cosine", "quadratic"), numbers, strict=True):
            wanted = (specs[name], schedule)
            ratios = [row["frechet_ratio"] for row in rows("targets_digits.jsonl") if (row["spec"], row["schedule"]) == wanted]
            assert len(ratios) == 3
            assert float(number.strip("*")) == round(statistics.mean(ratios), 2)
            assert number.startswith("**") == (max(ratios) < 1)


def test_the_demo_figures_are_those_of_the_file():
    found = {(row["sampler"], row["seed"]): row["distance"] for row in rows("demo_digits.jsonl")}
    for sampler, place in (("adaptive", r"`adaptive` were at ([\d.]+) times"), ("minsnr", r"Min-SNR at ([\d.]+),")):
        ratios = [found[sampler, seed] / found["uniform", seed] for seed in (0, 1)]
        (claim,) = re.findall(place, README)
        assert float(claim) == round(statistics.mean(ratios), 2)
        assert max(ratios) < 1
