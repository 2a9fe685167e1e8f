"""README and docs: what is generated is up to date, code and specs run, links lead somewhere. No test knows their words."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import noisewise
from noisewise import DDPM, SAMPLERS, WEIGHTINGS, Flow
from noisewise.samplers.adaptive import ESTIMATORS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CARDS = {f"docs/methods/{name}.md": name for name in SAMPLERS} | {f"docs/weightings/{name}.md": name for name in WEIGHTINGS}
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md"))]
MORE = ["CONTRIBUTING.md", "CHANGELOG.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("benchmarks/**/*.md"))]


def read(page: str) -> str:
    return (ROOT / page).read_text()


def fenced(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", read(page), re.DOTALL | re.MULTILINE)


# Generated places


@pytest.fixture(scope="module")
def generate() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        yield importlib.import_module("generate")


def test_regenerating_changes_nothing(generate: Any) -> None:
    assert generate.stale() == [], "run python docs/generate.py"


def test_what_was_changed_by_hand_is_stale(generate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "# Words\n\n<!-- generated: {} -->\n\n{}\n\n<!-- end -->\n"
    made = page.format("processes", generate.place("processes", ""))
    (tmp_path / "README.md").write_text(made.replace("1000", "999"))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "card.md").write_text(page.format("settings minsnr", "| setting | default |\n|---|---|"))
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    assert generate.stale() == [
        "README.md: processes",
        "docs/card.md: settings minsnr: gamma is missing: add a line that says what it means",
    ]
    assert generate.regenerated(made.replace("1000", "999")) == made


def test_every_marker_is_a_place(generate: Any) -> None:
    """A misspelt or unclosed one would be left alone."""
    for path in generate.pages():
        text = path.read_text()
        assert len(generate.PLACE.findall(text)) == text.count("<!-- generated") == text.count("<!-- end"), path.name


# Cards


def test_every_name_has_a_card_and_every_card_a_name() -> None:
    assert {page for page in PAGES if page.startswith(("docs/methods/", "docs/weightings/"))} == set(CARDS)


@pytest.mark.parametrize(("page", "name"), CARDS.items(), ids=list(CARDS.values()))
def test_a_card_has_the_sections_settings_and_measurements_of_the_others(page: str, name: str, generate: Any) -> None:
    def sections(card: str) -> list[str]:
        return sorted(line for line in read(card).splitlines() if line.startswith("## ") and "Estimator" not in line)

    assert read(page).startswith(f"# `{name}`\n")
    assert sections(page) == sections("docs/methods/uniform.md")
    assert f"<!-- generated: measured {name} -->" in read(page)
    if generate.settings.must_be_listed({**SAMPLERS, **WEIGHTINGS}[name]):
        assert f"<!-- generated: settings {name} -->" in read(page)


def test_every_estimator_has_its_settings_on_the_card_and_its_evidence_in_the_record() -> None:
    _, *estimators = re.split(r"^## Estimator ", read("docs/methods/adaptive.md"), flags=re.MULTILINE)
    assert [text.partition("\n")[0] for text in estimators] == [f"`{name}`" for name in ESTIMATORS]
    record = read("benchmarks/adaptive-estimators.md")
    for text, name in zip(estimators, ESTIMATORS, strict=True):
        assert f"<!-- generated: estimator {name} -->" in text
        assert all(f"<!-- generated: {what} {name} -->" in record for what in ("gains", "thirds"))


# Specs


@pytest.mark.parametrize("page", [page for page in PAGES if fenced(page, "spec")])
def test_specs_build(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "density.npy", np.ones(10))
    monkeypatch.chdir(tmp_path)
    for spec in (line for block in fenced(page, "spec") for line in block.split()):
        assert noisewise.recipe(spec, DDPM.linear()).sampler.sample(8).u.shape == (8,)


@pytest.mark.parametrize(("page", "name"), CARDS.items(), ids=list(CARDS.values()))
def test_a_card_shows_specs_with_its_name(page: str, name: str) -> None:
    specs = [line for block in fenced(page, "spec") for line in block.split()]
    assert specs
    assert all(re.search(rf"\b{name}\b", spec) for spec in specs)


def test_every_spec_on_the_page_on_migration_builds() -> None:
    """Code that begins as a spec does, with numbers for the letters."""
    names = "|".join(sorted({*SAMPLERS, *WEIGHTINGS} - {"table", "speed", "shift"}))
    specs = set(re.findall(rf"`((?:{names}|shift(?=:))(?::[^`]*)?(?:\+\w+)?)`", read("docs/migration.md")))
    assert len(specs) > 15
    for spec in specs:
        filled = re.sub(r"(?<=of=)(\(\.\.\.\)|\.\.\.)", "uniform", spec).replace("...", "1")
        noisewise.recipe(re.sub(r"(?<==)(-?)[a-z]\b", r"\g<1>1.5", filled), Flow())


# Code: pages with commands are run by test_page_commands.py, in their order; all others here


LOOP = """
import torch
import noisewise
from noisewise import DDPM, Objective

network = torch.nn.Linear(3, 3)
model = lambda x, time: network(x)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
loader = micro_batches = torch.randn(5, 8, 3).unbind()
objective = Objective(DDPM.linear())
recipe = noisewise.recipe("adaptive", objective)
recipe.attach(optimizer)
losses_of = lambda x0, u: objective.losses(model, x0, u)
loss_at = lambda rows, u: losses_of(x0[rows], u)
"""
TAKEN_FOR_GRANTED = {"docs/distributed.md": LOOP}
LANGUAGES = {"python", "sh", "spec", "text", "yaml", "diff"}


@pytest.mark.parametrize("page", [page for page in PAGES[1:] if fenced(page, "python") and not fenced(page, "sh")])
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, in one namespace, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    code = "\n".join([TAKEN_FOR_GRANTED.get(page, ""), *fenced(page, "python")])
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


def trained_by_the_readme(spec: str) -> torch.Tensor:
    """The weights of a model after the loop of the README with this spec in it."""
    code = "\n".join(fenced("README.md", "python"))
    assert '"adaptive"' in code

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    torch.manual_seed(0)
    model = Model(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"model": model, "optimizer": optimizer, "loader": torch.randn(5, 8, 3).unbind()}
    exec(code.replace('"adaptive"', f'"{spec}"'), names)
    return model.weight.detach()


def test_the_loop_of_the_readme_trains_with_any_method() -> None:
    """Each in its own way: a weighting that the loop left out would go unnoticed otherwise."""
    specs = [
        "adaptive",
        "uniform",
        "speed:k=5",
        "change_aware",
        "speed:k=5+change_aware",
        "logit_normal",
        "logit_normal+minsnr:gamma=5",
    ]
    found = [trained_by_the_readme(spec) for spec in specs]
    assert all(not torch.equal(a, b) for k, a in enumerate(found) for b in found[:k])


@pytest.mark.parametrize("page", PAGES)
def test_no_block_of_code_escapes(page: str) -> None:
    """A fence that is indented, or in a language with another name, would not be run and nobody would know."""
    fences = [line for line in read(page).splitlines() if re.match(r"\s*(```|~~~)", line)]
    assert fences[1::2] == ["```"] * (len(fences) // 2), "indented, or not closed"
    assert {line.removeprefix("```") for line in fences[::2]} <= LANGUAGES
    for block in fenced(page, "text"):
        assert not re.search(r"^(import|from) \w", block, re.MULTILINE), "a program: call it python"


# Links and pictures


def anchors(path: Path) -> set[str]:
    """The places of a page that can be linked to."""
    titles = re.findall(r"^#+ (.*)", path.read_text(), re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("page", [*PAGES, *MORE])
def test_links_lead_somewhere_and_pictures_say_what_they_show(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.DOTALL | re.MULTILINE)
    for picture, words, target in re.findall(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", text):
        assert words or not picture, target
        place, _, anchor = target.partition("#")
        if not target.startswith(("http", "mailto:")):
            path = (ROOT / page).parent / place if place else ROOT / page
            assert path.exists(), target
            assert not anchor or anchor in anchors(path), target


def test_pictures_are_small() -> None:
    assert {path.name for path in (DOCS / "img").glob("*.png") if path.stat().st_size > 450_000} == set()
