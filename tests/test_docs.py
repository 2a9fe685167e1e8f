"""The documentation agrees with the code: a card for every name, the code's defaults, specs that build, examples that run."""

import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import noisewise
from noisewise import DDPM, SAMPLERS, WEIGHTINGS, AdaptiveSampler, Objective, Sampler
from noisewise.samplers.adaptive import ESTIMATORS
from noisewise.samplers.learning import Learner
from noisewise.spec import _parameters

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = DOCS.parent / "benchmarks" / "results"
REQUIRED = "required"
MAKERS: dict[str, Callable[..., Any]] = {
    **{f"methods/{name}.md": maker for name, maker in SAMPLERS.items()},
    **{f"weightings/{name}.md": maker for name, maker in WEIGHTINGS.items()},
}
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
COMMON = ("correction", "draws", "seed")
SECTIONS = ("Formula", "Settings", "Spec", "Cost", "What it does to p and w", "Known failures and traps")
SECTIONS += ("When it helps", "When not to use it", "Measured")
ADAPTIVE = "methods/adaptive.md"
PARTS = ("Equations", "What it measures", "Settings", "Cost", "Known failures and traps", "When not to use it", "Evidence")
OWN = "the estimator's own"  # how a card writes correction=None and floor=None: `none` is a correction, or looks like no floor


def fenced(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def section(page: str, title: str) -> str:
    """What stands between this heading of the second level and the next."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    assert found, f"{page} has no section {title}"
    return found[1]


def settings_table(text: str) -> dict[str, str]:
    """Column 'default' of the first table whose columns are setting | default | meaning."""
    rows: dict[str, str] = {}
    inside = False
    for line in text.splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
        if cells == ["setting", "default", "meaning"]:
            inside = True
        elif inside and not line.startswith("|"):
            break
        elif inside and not set(cells[0]) <= set("-:"):
            assert len(cells) == 3, f"{line!r} has {len(cells)} cells, not 3"
            assert cells[0] not in rows, f"{cells[0]} is listed twice"
            rows[cells[0]] = cells[1]
    return rows


def is_preset(maker: Callable[..., Any]) -> bool:
    """Whether it is a function that sets up an adaptive sampler."""
    return inspect.isfunction(maker) and inspect.signature(maker).return_annotation is AdaptiveSampler


def preset_values(maker: Callable[..., Any]) -> dict[str, Any]:
    """What a preset sets, as found on a sampler that it has built."""
    sampler = maker(DDPM.linear())
    estimator = sampler.estimator
    values = {name: getattr(estimator, name) for name in ("every", "hidden", "depth", "lr", "entropy", "normalise", "chosen")}
    values |= {"queue": len(estimator.queue), "strata": len(estimator.edges) - 1}
    values |= {"floor": sampler.floor, "correction": str(sampler.correction)}
    values["estimator"] = next(name for name, kind in ESTIMATORS.items() if type(estimator) is kind)
    values["target"] = next(name for name, kind in WEIGHTINGS.items() if type(sampler.target) is kind)
    return values


def code_defaults(maker: Callable[..., Any]) -> dict[str, Any]:
    """Every setting's default; a partial's keywords win, then the class, its estimator, what learners and all share."""
    if is_preset(maker):
        return preset_values(maker)
    target, fixed = getattr(maker, "func", maker), getattr(maker, "keywords", {})
    sources = [target]
    if hasattr(target, "option_sources"):
        estimator = fixed.get("estimator", inspect.signature(target).parameters["estimator"].default)
        sources.append(ESTIMATORS[estimator])
    if inspect.isclass(target):
        sources += [base for base in (Learner, Sampler) if issubclass(target, base)]
    defaults = dict(fixed)
    for source in sources:
        for parameter in inspect.signature(source).parameters.values():
            defaults.setdefault(parameter.name, REQUIRED if parameter.default is parameter.empty else parameter.default)
    for name in ("correction", "floor") if hasattr(target, "option_sources") else ():
        if defaults[name] is None:
            defaults[name] = getattr(ESTIMATORS[estimator], name) if "estimator" in fixed else OWN
    known = _parameters(maker)
    return {name: value for name, value in defaults.items() if name in known and name not in ("args", "kwargs")}


def must_be_listed(maker: Callable[..., Any]) -> set[str]:
    """Settings of the method itself, of a fixed estimator, of learning samplers, and shared ones whose default it changes."""
    if is_preset(maker):
        return set(preset_values(maker))
    defaults, shared = code_defaults(maker), code_defaults(Sampler)
    target = getattr(maker, "func", maker)
    own = set(inspect.signature(target).parameters)
    if inspect.isclass(target) and issubclass(target, Learner):
        own |= set(inspect.signature(Learner).parameters)
    if estimator := getattr(maker, "keywords", {}).get("estimator"):
        own |= set(inspect.signature(ESTIMATORS[estimator]).parameters)
    differing = {name for name in COMMON if name in defaults and defaults[name] != shared[name]}
    return {name for name in defaults if name in own and name not in COMMON} | differing


def same(text: str, value: Any) -> bool:
    if isinstance(value, str):
        return text == value
    if value is None or isinstance(value, bool):
        return text == str(value).lower()
    return float(text) == value


def test_every_name_has_a_card_and_every_card_a_name() -> None:
    cards = {page for page in PAGES if page.startswith(("methods/", "weightings/"))}
    assert set(MAKERS) <= cards, f"without a card: {sorted(set(MAKERS) - cards)}"
    assert cards <= set(MAKERS), f"cards of nothing: {sorted(cards - set(MAKERS))}"


@pytest.mark.parametrize("page", MAKERS)
def test_card_has_every_section(page: str) -> None:
    text = (DOCS / page).read_text()
    assert text.startswith(f"# `{Path(page).stem}`\n")
    estimators = [f"Estimator `{name}`" for name in ESTIMATORS] if page == ADAPTIVE else []
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == [*SECTIONS, *estimators]


@pytest.mark.parametrize("page", MAKERS)
def test_card_has_what_was_measured(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    lines = importlib.import_module("make_cards").measured(Path(page).stem)
    shown = section(page, "Measured").partition("<!-- table: measured -->")[2].partition("<!-- end -->")[0]
    assert shown.strip().splitlines() == lines, "run docs/make_cards.py"


@pytest.mark.parametrize(("page", "maker"), MAKERS.items(), ids=list(MAKERS))
def test_card_defaults_are_those_of_the_code(page: str, maker: Callable[..., Any]) -> None:
    listed, defaults = settings_table((DOCS / page).read_text()), code_defaults(maker)
    assert must_be_listed(maker) <= set(listed), f"not on the card: {sorted(must_be_listed(maker) - set(listed))}"
    assert set(listed) <= set(defaults), f"not in the code: {sorted(set(listed) - set(defaults))}"
    wrong = {name: (text, defaults[name]) for name, text in listed.items() if not same(text, defaults[name])}
    assert not wrong, f"(card, code): {wrong}"


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_has_its_parts_and_the_codes_defaults(name: str) -> None:
    text, kind = section(ADAPTIVE, f"Estimator `{name}`"), ESTIMATORS[name]
    assert [line[4:] for line in text.splitlines() if line.startswith("### ")] == list(PARTS)
    defaults = {key: parameter.default for key, parameter in inspect.signature(kind).parameters.items() if key != "edges"}
    defaults |= {"strata": kind.strata, "correction": kind.correction, "floor": kind.floor}
    listed = settings_table(text)
    assert set(listed) == set(defaults)
    wrong = {key: (value, defaults[key]) for key, value in listed.items() if not same(value, defaults[key])}
    assert not wrong, f"(card, code): {wrong}"


@cache
def digits_results() -> dict[str, list[dict[str, Any]]]:
    """The runs of each method in targets_digits.jsonl, on the linear schedule."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for line in (RESULTS / "targets_digits.jsonl").read_text().splitlines():
        run = json.loads(line)
        if run["schedule"] == "linear":
            runs.setdefault(run["method"], []).append(run)
    return runs


def test_the_adaptive_card_shows_every_measured_target() -> None:
    """Rows `method | share of draws | held-out loss | Frechet distance`, each the mean over the seeds in the file."""
    shown = {}
    for line in (DOCS / ADAPTIVE).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0] in digits_results():
            assert cells[0] not in shown
            shown[cells[0]] = [float(number) for cell in cells[1:] for number in cell.split(" / ")]
    assert set(shown) == set(digits_results())
    for method, numbers in shown.items():
        runs = [[*run["drawn"], *run["loss_ratio"], run["frechet_ratio"]] for run in digits_results()[method]]
        np.testing.assert_allclose(numbers, np.mean(runs, 0), rtol=0, atol=0.0051, err_msg=method)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_adaptive_card_shows_the_rank_correlations(name: str) -> None:
    """Rows `problem | steps | Spearman's rho`, as in known_answers.jsonl."""
    measured = {}
    for line in (RESULTS / "known_answers.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row.get("estimator", "").split(" ")[0] == name:
            measured[f"`{row['problem']}`", str(row["horizon"])] = row["spearman"]
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in section(ADAPTIVE, f"Estimator `{name}`").splitlines()
    ]
    shown = {row[:2]: float(row[2]) for row in rows if row[:2] in measured}
    assert measured
    assert shown == {key: round(value, 2) for key, value in measured.items()}


def page_cells(name: str) -> dict[str, list[str]]:
    """A table of adaptive.md that a script fills in: the first cell of each row, and the others."""
    found = re.search(rf"<!-- table: {name} -->\n(.*?)<!-- end -->", (DOCS / "adaptive.md").read_text(), re.DOTALL)
    assert found, f"adaptive.md has no table {name}"
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].strip().splitlines()[2:]]
    return {cells[0].strip("`"): cells[1:] for cells in lines}


def page_table(name: str) -> dict[str, list[float]]:
    """The first cell of each row of such a table, and the numbers in the others."""
    return {key: [float(x) for x in re.findall(r"-?\d+\.\d+", " ".join(cells))] for key, cells in page_cells(name).items()}


def result_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def assert_table(name: str, expected: dict[str, list[float]], rounding: float = 0.0051) -> None:
    shown = page_table(name)
    assert set(shown) == set(expected)
    for key, numbers in expected.items():
        np.testing.assert_allclose(
            shown[key], numbers, rtol=0, atol=rounding, err_msg=f"{name}: {key}; run docs/make_figures.py"
        )


def distances() -> dict[tuple[str, str], list[float]]:
    """The Frechet distances over uniform's of each method and schedule, one for each seed."""
    found: dict[tuple[str, str], list[float]] = {}
    for run in result_rows("targets_digits.jsonl"):
        found.setdefault((run["method"], run["schedule"]), []).append(run["frechet_ratio"])
    return found


def test_the_adaptive_page_shows_what_was_measured_on_digits() -> None:
    thirds = {
        method: np.mean([[*run["drawn"], *run["loss_ratio"], run["frechet_ratio"]] for run in runs], 0)
        for method, runs in digits_results().items()
    }
    assert_table("thirds", thirds)
    measured, schedules = distances(), ("linear", "cosine", "quadratic")
    everywhere = [method for method in thirds if method != "uniform" and all((method, s) in measured for s in schedules)]
    runs = {method: [measured[method, schedule] for schedule in schedules] for method in everywhere}
    assert all(len(values) == 3 for of_method in runs.values() for values in of_method), "three seeds each, as the page says"
    expected = {name: [f(v) for v in of_method for f in (np.mean, min, max)] for name, of_method in runs.items()}
    assert_table("frechet", expected)


def test_the_adaptive_page_says_only_what_the_digits_show() -> None:
    """The sentences of the page that its advice rests on."""
    measured, schedules = distances(), ("linear", "cosine", "quadratic")
    losses: dict[tuple[str, str], list[list[float]]] = {}
    for run in result_rows("targets_digits.jsonl"):
        losses.setdefault((run["method"], run["schedule"]), []).append(run["loss_ratio"])
    shown = page_table("frechet")
    mean = {key: float(np.mean(values)) for key, values in measured.items()}
    always = {method for method in shown if all(max(measured[method, schedule]) < 1 for schedule in schedules)}
    biased = "loss, Min-SNR, no importance weight"
    assert always == {"loss, plain", biased}
    winners = [min(shown, key=lambda method, s=schedule: mean[method, s]) for schedule in schedules]
    assert winners == ["lookahead, VLB", "loss, plain", biased]
    losers = {method for method in shown if all(mean[method, schedule] > 1 for schedule in schedules)}
    assert losers == {"Min-SNR", "loss, VLB, no importance weight"}
    only_cosine = {m for m in shown if mean[m, "cosine"] > 1 and max(mean[m, "linear"], mean[m, "quadratic"]) < 1}
    assert only_cosine == {"loss, Min-SNR", "reinforce as published (VLB)"}
    for schedule in schedules:
        assert mean["loss, Min-SNR", schedule] < mean["Min-SNR", schedule]
        assert mean[biased, schedule] < mean["loss, Min-SNR", schedule]
        assert np.mean(losses["loss, plain", schedule], 0).max() < 1.01
        assert np.mean(losses[biased, schedule], 0)[2] > 1.1
    better = [schedule for schedule in schedules if mean[biased, schedule] < mean["loss, plain", schedule]]
    assert better == ["linear", "quadratic"]
    linear_only = set(page_table("thirds")) - set(shown) - {"uniform"}
    lost = {"reinforce, VLB", "lookahead, Min-SNR", "lookahead, scale-free"}
    assert {method for method in linear_only if min(measured[method, "linear"]) > 1} == lost
    assert all(min(measured[m, "linear"]) < 1 < max(measured[m, "linear"]) for m in linear_only - lost)


def test_the_adaptive_page_says_only_what_the_unets_show() -> None:
    page = (DOCS / "adaptive.md").read_text()
    screen = {(row["process"], row["seed"], row["sampler"]): row["distance"] for row in result_rows("digits_screen.jsonl")}
    plain, default = (
        [value / screen[process, seed, "uniform"] for (process, seed, sampler), value in screen.items() if sampler == spec]
        for spec in ("adaptive+none", "adaptive+minsnr:gamma=5")
    )
    assert len(plain) == len(default) == 5
    assert f"{min(plain):.2f} to {max(plain):.2f} of uniform's distance in five runs of 700 steps" in page
    assert f"where Min-SNR's objective drawn in the same way has {min(default):.2f} to {max(default):.2f}." in page
    table = list(page_cells("unets").values())
    default, smaller, independent, _, minsnr, *_ = zip(*table, strict=True)
    for column in (default, smaller):
        assert all(float(ratio) < 1 for cells in column for ratio in cells.split(" / ") if ratio not in ("", "–")), (
            "in every run"
        )
        assert all(mine < weight for mine, weight in pairs(column, minsnr)), "and better than the weight alone"
    assert len(pairs(smaller, minsnr)) == 10
    floors = [mine / other for mine, other in pairs(default, smaller)]
    mean = f"{np.exp(np.mean(np.log(floors))):.2f} times the distance in the mean of nine runs"
    assert len(floors) == 9
    assert f"{mean}, from {min(floors):.2f} to {max(floors):.2f} times" in page
    draws = [strata < one for strata, one in pairs(smaller, independent)]
    assert (sum(draws), len(draws)) == (8, 10), "nine of the digits, and one of CIFAR-10, where they end the same"
    ends = {(row["method"], row["step"]): row["distance"] for row in result_rows("cifar10-v1-field.jsonl") if row["seed"] == 1}
    half, last = (
        [ends[method, step] for method in ("loss-weighted-unbiased", "adaptive:draws=stratified")] for step in (5000, 10000)
    )
    assert f"With seed 1 they took it from {half[0]:.1f} to {half[1]:.1f} there" in page
    assert f"nothing was left of that ({last[0]:.1f} and {last[1]:.1f})" in page
    assert "better than independent ones in eight of the nine runs on the digits" in page
    # the first of each name: draws were independent then
    found = {(row["step"], row["sampler"]): row["distance"] for row in reversed(result_rows("cifar10-v1-search.jsonl"))}
    uniform = [row for row in result_rows("cifar10-v1-field.jsonl") if (row["sampler"], row["seed"]) == ("uniform", 0)]
    found |= {(row["step"], row["sampler"]): row["distance"] for row in uniform}
    for mine, other, text in [
        ("adaptive:draws=stratified", "adaptive", "after 5,000 steps from {:.1f} to {:.1f}"),
        ("uniform:draws=stratified", "uniform", "that of uniform itself from {:.1f} to {:.1f}"),
    ]:
        assert text.format(found[5000, other], found[5000, mine]) in page


def pairs(mine: Sequence[str], others: Sequence[str]) -> list[tuple[float, float]]:
    """Ratios of the same run in two columns of a table, where both were run."""
    rows = [(one.split(" / "), other.split(" / ")) for one, other in zip(mine, others, strict=True) if one and other]
    return [(float(a), float(b)) for row in rows for a, b in zip(*row, strict=True) if "–" not in (a, b)]


def test_the_floors_on_the_adaptive_page_are_those_of_the_search() -> None:
    last = {row["sampler"]: row["distance"] for row in result_rows("cifar10-v1-search.jsonl") if row["step"] == 5000}
    known = [last["adaptive:draws=stratified,floor=0.05"]]
    known += [last[f"adaptive{floor}"] for floor in ("", ":floor=0.35", ":floor=0.5")]
    known.append(last["uniform:draws=stratified+minsnr:gamma=5"])
    (line,) = re.findall(r"^- \*\*The floor\*\* matters.*$", (DOCS / "adaptive.md").read_text(), re.MULTILINE)
    shown = re.findall(r"(\d\d\.\d) with [\d.]+|it was (\d\d\.\d)\.", line)
    assert [float(a or b) for a, b in shown] == [round(value, 1) for value in known]
    assert min(known) == known[2], "0.35 is the default because of this"


def test_the_adaptive_card_knows_how_large_its_weights_get() -> None:
    (line,) = re.findall(r"^- The importance weight is at most 1/floor times.*$", (DOCS / ADAPTIVE).read_text(), re.MULTILINE)
    levels = (torch.arange(1000) + 0.5) / 1000
    for prediction, shown in zip(("eps", "v"), re.findall(r"([\d.]+) for [εv]", line), strict=True):
        sampler = AdaptiveSampler(Objective(DDPM.linear(), prediction))
        assert float(sampler.target_weight(levels).max()) / sampler.floor == pytest.approx(float(shown), rel=0.02)


def test_the_adaptive_page_shows_the_known_answers() -> None:
    rows = result_rows("known_answers.jsonl")
    gains: dict[str, list[float]] = {}
    excess: dict[str, list[float]] = {}
    for row in rows:
        if "spearman" in row:
            gains.setdefault(row["estimator"].split(" ")[0], []).append(row["spearman"])
        else:
            excess.setdefault(row["sampler"], []).append(row["mean excess"])
            assert (row["steps"], row["seeds"]) == (400, 4)
    assert_table("gains", gains)
    uniform = np.array(excess.pop("uniform"))
    assert_table("outcomes", {sampler: np.array(values) / uniform for sampler, values in excess.items()})


def test_the_adaptive_page_shows_what_a_step_costs() -> None:
    rows = result_rows("step_cost.jsonl")
    for row in rows:
        assert (row["gpu"], round(row["parameters"] / 1e6, 1), row["batch"]) == ("NVIDIA H200", 35.7, 128)
        assert (row["precision"], row["compile"]) == ("bf16 autocast", False)
    found = {
        row["spec"]: [row["ratio"], *row["range"], *([row["event_ms"] / 1e3] if "event_ms" in row else [])] for row in rows
    }
    found["adaptive+none"] = found.pop("adaptive")  # which had no target of its own then
    assert_table("cost", found, 0.051)
    for spec, numbers in page_table("cost").items():
        np.testing.assert_allclose(numbers[:3], found[spec][:3], rtol=0, atol=0.00051)


def test_the_pictures_are_there_and_small() -> None:
    shown = set(re.findall(r"\(img/(\w+\.png)\)", (DOCS / "adaptive.md").read_text()))
    assert len(shown) == 5
    assert sum((DOCS / "img" / name).stat().st_size for name in shown) < 600_000


@pytest.mark.parametrize("page", PAGES)
def test_specs_build(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "density.npy", np.ones(10))
    monkeypatch.chdir(tmp_path)
    specs = [line for block in fenced(page, "spec") for line in block.split()]
    assert specs or page not in MAKERS, "a card shows at least one spec"
    for spec in specs:
        draw = noisewise.recipe(spec, DDPM.linear()).sampler.sample(8)
        assert draw.u.shape == (8,)


@pytest.mark.parametrize("page", MAKERS)
def test_card_specs_use_the_name(page: str) -> None:
    name = Path(page).stem
    assert all(re.search(rf"\b{name}\b", line) for block in fenced(page, "spec") for line in block.split())


# Every block of code is run: pages with commands by test_docs_commands.py, in their order; all others here


README = "../README.md"
PROGRAMS = [page for page in PAGES if fenced(page, "python") and not fenced(page, "sh")] + [README]
LOOP = """
import torch
from noisewise import DDPM, AdaptiveSampler, Objective

network = torch.nn.Linear(3, 3)
model = lambda x, time: network(x)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
loader = micro_batches = torch.randn(5, 8, 3).unbind()
sampler = AdaptiveSampler(DDPM.linear())
losses_of = lambda x0, u: Objective(sampler.process).losses(model, x0, u)
loss_at = lambda rows, u: losses_of(x0[rows], u)
"""
PREAMBLES = {README: LOOP, "distributed.md": LOOP}
"""Names that a page takes for granted."""
LANGUAGES = {"python", "sh", "spec", "text", "yaml", "diff"}


@pytest.mark.parametrize("page", PROGRAMS)
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, in one namespace, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    code = "\n".join([PREAMBLES.get(page, ""), *fenced(page, "python")])
    before = dict(SAMPLERS)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            exec(compile(code, page, "exec"), {"__name__": "docs"})
        finally:
            SAMPLERS.clear()
            SAMPLERS.update(before)
            if "accelerate.state" in sys.modules:
                sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("page", [*PAGES, README])
def test_no_block_of_code_escapes(page: str) -> None:
    """A fence that is indented, or in a language with another name, would not be run and nobody would know."""
    fences = [line for line in (DOCS / page).read_text().splitlines() if re.match(r"\s*(```|~~~)", line)]
    assert fences[1::2] == ["```"] * (len(fences) // 2), "indented, or not closed"
    assert {line.removeprefix("```") for line in fences[::2]} <= LANGUAGES
    for block in fenced(page, "text"):
        assert not re.search(r"^(import|from) \w", block, re.MULTILINE), "a program: call it python"


def test_the_start_page_describes_the_demo_as_the_readme_does() -> None:
    """Whose numbers test_readme.py compares with the file."""
    sentences = [
        " ".join(re.search(r"Here, after .*?\sagree", (DOCS / page).read_text(), re.DOTALL)[0].split())  # type: ignore[index]
        for page in ("index.md", README)
    ]
    assert sentences[0] == sentences[1]


def test_the_page_on_reports_has_the_losses_of_the_demo() -> None:
    losses = {(row["sampler"], row["seed"]): np.array(row["held_out"]) for row in result_rows("demo_digits.jsonl")}
    ratio = {name: np.mean([losses[name, s] / losses["uniform", s] for s in (0, 1)], 0) for name in ("minsnr", "adaptive")}
    (shown,) = re.findall(r"^In the demo `minsnr`.*$", (DOCS / "reading-a-report.md").read_text(), re.MULTILINE)
    first, last, *adaptive = re.findall(r"\b\d\.\d\d\b", shown)
    assert [first, last] == [f"{ratio['minsnr'][i]:.2f}" for i in (0, -1)]
    assert adaptive == [f"{ratio['adaptive'][i]:.2f}" for i in (0, -1)]
    assert f"first of {len(ratio['minsnr'])} levels" in shown


def test_own_sampler_page_shows_the_example() -> None:
    example = (DOCS.parent / "examples" / "own_sampler.py").read_text()
    shown = example[example.index("class Triangular") : example.index("def train")].strip()
    assert shown in (DOCS / "own-sampler.md").read_text()


def test_every_page_is_in_the_navigation() -> None:
    navigation = (DOCS.parent / "mkdocs.yml").read_text()
    missing = [page for page in PAGES if not re.search(rf": {re.escape(page)}$", navigation, re.MULTILINE)]
    assert not missing
