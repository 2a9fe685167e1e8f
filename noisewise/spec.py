"""Spec strings: one line that names a sampler, its weighting and their settings.

    uniform                              a sampler
    minsnr:gamma=5                       a weighting, with the uniform sampler
    speed:k=5+change_aware               both
    lognormal+minsnr:gamma=5             both, with a setting
    mix:of=(speed:k=5),floor=0.1         a sampler made of samplers, in brackets
    adaptive+minsnr                      a learning sampler; its target is the weighting unless it names its own

Grammar: term ("+" term)*, term = name [":" key=value ("," key=value)*], value = number | true | false | none | word | (spec).
"""

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from noisewise.objective import Prediction
from noisewise.processes import Process
from noisewise.samplers import SAMPLERS, Sampler
from noisewise.weighting import WEIGHTINGS, NoWeight, Weighting


class SpecError(ValueError):
    """A spec string that cannot be understood, with what was probably meant."""


@dataclass(frozen=True)
class Term:
    name: str
    options: dict[str, str]


@dataclass(frozen=True)
class Recipe:
    """How noise levels are drawn and how their losses count."""

    spec: str
    sampler: Sampler
    weighting: Weighting


def build(spec: str, process: Process, *, prediction: Prediction = "eps", **common: Any) -> Recipe:
    """Make the sampler and the weighting that a spec string names.

    Args:
        spec: see this module's documentation.
        process: the noising process.
        prediction: what the model predicts, for samplers with a target.
        common: settings for the outermost sampler that the spec does not give, such as seed=1.
    """
    sampler_term: Term | None = None
    weighting: Weighting | None = None
    for term in parse(spec):
        if term.name in SAMPLERS:
            if sampler_term is not None:
                raise SpecError(f"{spec!r} names two samplers, {sampler_term.name} and {term.name}; use mix, switch or product")
            sampler_term = term
        elif term.name in WEIGHTINGS:
            another = _make(term, WEIGHTINGS[term.name], {}, None)
            weighting = another if weighting is None else weighting * another
        else:
            raise _unknown("sampler or weighting", term.name, [*SAMPLERS, *WEIGHTINGS], spec)
    weighting = NoWeight() if weighting is None else weighting
    sampler_term = sampler_term or Term("uniform", {})
    maker = SAMPLERS[sampler_term.name]
    settings = dict(common)
    accepted = _parameters(maker)
    if "target" in accepted and not isinstance(weighting, NoWeight):
        settings.setdefault("target", weighting)
    if "prediction" in accepted:
        settings.setdefault("prediction", prediction)
    return Recipe(spec, _make(sampler_term, maker, settings, process), weighting)


def build_sampler(spec: str, process: Process, **common: Any) -> Sampler:
    """The sampler of a spec that has no weighting."""
    recipe = build(spec, process, **common)
    if not isinstance(recipe.weighting, NoWeight):
        raise SpecError(f"{spec!r} has a weighting, but only a sampler can stand here; name the weighting beside it")
    return recipe.sampler


def build_weighting(spec: str) -> Weighting:
    """The weighting of a spec that has no sampler."""
    product: Weighting | None = None
    for term in parse(spec):
        if term.name not in WEIGHTINGS:
            raise _unknown("weighting", term.name, WEIGHTINGS, spec)
        one = _make(term, WEIGHTINGS[term.name], {}, None)
        product = one if product is None else product * one
    return product or NoWeight()


def parse(spec: str) -> list[Term]:
    """The terms of a spec, not yet looked up."""
    terms = []
    for part in _split(spec, "+", spec):
        name, _, options_text = part.partition(":")
        options: dict[str, str] = {}
        for option in _split(options_text, ",", spec) if options_text.strip() else []:
            key, equals, value = option.partition("=")
            if not equals or not key.strip() or not value.strip():
                raise SpecError(f"in {spec!r}: {option.strip()!r} should be key=value, as in {name.strip()}:key=value")
            if key.strip() in options:
                raise SpecError(f"in {spec!r}: {key.strip()} is given twice")
            options[key.strip()] = value.strip()
        if not name.strip():
            raise SpecError(f"in {spec!r}: a name is missing; write it as name:key=value+name")
        terms.append(Term(name.strip(), options))
    return terms


def _split(text: str, separator: str, spec: str) -> list[str]:
    """Split at separators outside brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth < 0:
            break
        if character == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    if depth:
        raise SpecError(f"in {spec!r}: brackets do not match")
    return [*parts, text[start:]]


def _make(term: Term, maker: Callable[..., Any], settings: dict[str, Any], process: Process | None) -> Any:
    accepted = _parameters(maker)
    for key, text in term.options.items():
        if key not in accepted:
            raise _unknown(f"setting of {term.name}", key, accepted, term.name)
        settings[key] = _value(key, text, process)
    missing = [name for name, required in accepted.items() if required and name not in settings]
    if missing:
        raise SpecError(f"{term.name} needs {', '.join(missing)}, as in {term.name}:{missing[0]}=...")
    try:
        return maker(**settings) if process is None else maker(process, **settings)
    except TypeError as error:
        raise SpecError(f"{term.name}: {error}") from error


SAMPLER_SETTINGS = ("of", "start", "end", "first", "then")
WEIGHTING_SETTINGS = ("weight", "target")
TEXT_SETTINGS = ("correction", "draws", "file", "shape", "over", "estimator", "variance", "prediction", "policy", "selection")


def _value(key: str, text: str, process: Process | None) -> Any:
    inner = text[1:-1] if text.startswith("(") and text.endswith(")") else text
    if key in SAMPLER_SETTINGS and process is not None:
        return build_sampler(inner, process)
    if key in WEIGHTING_SETTINGS:
        return build_weighting(inner)
    if key in TEXT_SETTINGS:
        return text
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise SpecError(f"{key}={text}: expected a number, true, false or none")


def _parameters(maker: Callable[..., Any]) -> dict[str, bool]:
    """The settings a sampler or weighting takes, each with whether it must be given."""
    target = getattr(maker, "func", maker)  # a functools.partial has its class there
    sources: list[Callable[..., Any]] = [target, *getattr(target, "option_sources", list)()]
    if inspect.isclass(target) and issubclass(target, Sampler):
        sources.append(Sampler)
    accepted: dict[str, bool] = {}
    for source in sources:
        for parameter in inspect.signature(source).parameters.values():
            if parameter.name not in ("process", "edges") and parameter.kind is not parameter.VAR_KEYWORD:
                accepted.setdefault(parameter.name, parameter.default is parameter.empty)
    return accepted


def _unknown(what: str, name: str, known: Iterable[str], spec: str) -> SpecError:
    known = sorted(set(known))
    close = difflib.get_close_matches(name, known, 1)
    meant = f": did you mean {close[0]!r}?" if close else "."
    return SpecError(f"in {spec!r}: unknown {what} {name!r}{meant} Known: {', '.join(known)}")
