"""The documentation agrees with the code: a card for every name, the code's defaults, specs that build, examples that run."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noisewise import DDPM, SAMPLERS, WEIGHTINGS, Sampler, build
from noisewise.samplers.adaptive import ESTIMATORS
from noisewise.samplers.learning import Learner
from noisewise.spec import _parameters

DOCS = Path(__file__).parent.parent / "docs"
REQUIRED = "required"
MAKERS: dict[str, Callable[..., Any]] = {
    **{f"methods/{name}.md": maker for name, maker in SAMPLERS.items()},
    **{f"weightings/{name}.md": maker for name, maker in WEIGHTINGS.items()},
}
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
COMMON = ("correction", "draws", "seed")
SECTIONS = ("Formula", "Settings", "Spec", "Cost", "What it does to p and w", "Known failures and traps", "When not to use it")


def fenced(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def settings_table(page: str) -> dict[str, str]:
    """Column 'default' of the table whose columns are setting | default | meaning."""
    rows: dict[str, str] = {}
    inside = False
    for line in (DOCS / page).read_text().splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
        if cells == ["setting", "default", "meaning"]:
            inside = True
        elif inside and not line.startswith("|"):
            break
        elif inside and not set(cells[0]) <= set("-:"):
            assert len(cells) == 3, f"{page}: {line!r} has {len(cells)} cells, not 3"
            rows[cells[0]] = cells[1]
    return rows


def code_defaults(maker: Callable[..., Any]) -> dict[str, Any]:
    """Every setting's default; a partial's keywords win, then the class, its estimator, what learners and all share."""
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
    known = _parameters(maker)
    return {name: value for name, value in defaults.items() if name in known and name not in ("args", "kwargs")}


def must_be_listed(maker: Callable[..., Any]) -> set[str]:
    """Settings of the method itself, of a fixed estimator, of learning samplers, and shared ones whose default it changes."""
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
    estimators = {f"methods/{name}.md" for name in ESTIMATORS}
    assert cards <= set(MAKERS) | estimators, f"cards of nothing: {sorted(cards - set(MAKERS) - estimators)}"


@pytest.mark.parametrize("page", MAKERS)
def test_card_has_every_section(page: str) -> None:
    text = (DOCS / page).read_text()
    assert text.startswith(f"# `{Path(page).stem}`\n")
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == list(SECTIONS)


@pytest.mark.parametrize(("page", "maker"), MAKERS.items(), ids=list(MAKERS))
def test_card_defaults_are_those_of_the_code(page: str, maker: Callable[..., Any]) -> None:
    listed, defaults = settings_table(page), code_defaults(maker)
    assert must_be_listed(maker) <= set(listed), f"not on the card: {sorted(must_be_listed(maker) - set(listed))}"
    assert set(listed) <= set(defaults), f"not in the code: {sorted(set(listed) - set(defaults))}"
    wrong = {name: (text, defaults[name]) for name, text in listed.items() if not same(text, defaults[name])}
    assert not wrong, f"(card, code): {wrong}"


@pytest.mark.parametrize("page", PAGES)
def test_specs_build(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "density.npy", np.ones(10))
    monkeypatch.chdir(tmp_path)
    specs = [line for block in fenced(page, "spec") for line in block.split()]
    assert specs or page not in MAKERS, "a card shows at least one spec"
    for spec in specs:
        draw = build(spec, DDPM.linear()).sampler.sample(8)
        assert draw.u.shape == (8,)


@pytest.mark.parametrize("page", MAKERS)
def test_card_specs_use_the_name(page: str) -> None:
    name = Path(page).stem
    assert all(re.search(rf"\b{name}\b", line) for block in fenced(page, "spec") for line in block.split())


@pytest.mark.parametrize("page", ["index.md", "own-sampler.md"])
def test_python_blocks_run(page: str) -> None:
    before = dict(SAMPLERS)
    blocks = fenced(page, "python")
    assert blocks
    try:
        exec(compile("\n".join(blocks), page, "exec"), {"__name__": "docs"})
    finally:
        SAMPLERS.clear()
        SAMPLERS.update(before)


def test_own_sampler_page_shows_the_example() -> None:
    example = (DOCS.parent / "examples" / "own_sampler.py").read_text()
    shown = example[example.index("class Triangular") : example.index("def train")].strip()
    assert shown in (DOCS / "own-sampler.md").read_text()


def test_every_page_is_in_the_navigation() -> None:
    navigation = (DOCS.parent / "mkdocs.yml").read_text()
    missing = [page for page in PAGES if page not in navigation]
    assert not missing
