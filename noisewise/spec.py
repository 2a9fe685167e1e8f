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
from noisewise.weighting import WEIGHTINGS, NoWeight, Product, Weighting


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
    sampler_term, weighting = _terms(spec)
    inherited: dict[str, Any] = {"prediction": prediction}
    if not isinstance(weighting, NoWeight):
        inherited["target"] = weighting
    return Recipe(spec, _sampler(sampler_term or Term("uniform", {}), process, common, inherited), weighting)


def build_weighting(spec: str) -> Weighting:
    """The weighting of a spec that names no sampler."""
    sampler_term, weighting = _terms(spec)
    if sampler_term is not None:
        raise SpecError(f"{spec!r} names the sampler {sampler_term.name}, but only a weighting can stand here")
    return weighting


def _terms(spec: str) -> tuple[Term | None, Weighting]:
    """The one sampler that a spec names, if any, and the product of its weightings."""
    sampler_term: Term | None = None
    weightings = []
    for term in parse(spec):
        if term.name in SAMPLERS:
            if sampler_term is not None:
                raise SpecError(f"{spec!r} names two samplers, {sampler_term.name} and {term.name}; use mix, switch or product")
            sampler_term = term
        elif term.name in WEIGHTINGS:
            weightings.append(_call(term, WEIGHTINGS[term.name], [], _plain_settings(term, WEIGHTINGS[term.name])))
        else:
            raise _unknown("sampler or weighting", term.name, [*SAMPLERS, *WEIGHTINGS], spec)
    if len(weightings) > 1:
        return sampler_term, Product(*weightings)
    return sampler_term, weightings[0] if weightings else NoWeight()


def _sampler(term: Term, process: Process, common: dict[str, Any], inherited: dict[str, Any]) -> Sampler:
    """A sampler; the samplers inside it inherit the recipe's prediction and, if they learn, its target."""
    maker = SAMPLERS[term.name]
    accepted = _parameters(maker)
    settings = {**{key: value for key, value in inherited.items() if key in accepted}, **common}
    inner = {key: text for key, text in term.options.items() if key in SAMPLER_SETTINGS and key in accepted}
    plain = Term(term.name, {key: text for key, text in term.options.items() if key not in inner})
    settings.update(_plain_settings(plain, maker))
    for key, text in inner.items():
        inner_term, weighting = _terms(_unbracketed(text))
        if inner_term is None or not isinstance(weighting, NoWeight):
            raise SpecError(f"{term.name}: {key}={text} should be a sampler alone; put weightings outside, after a +")
        settings[key] = _sampler(inner_term, process, {}, inherited)
    return _call(term, maker, [process], settings)


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


SAMPLER_SETTINGS = ("of", "start", "end", "first", "then")
WEIGHTING_SETTINGS = ("weight", "target")
TEXT_SETTINGS = ("correction", "draws", "file", "shape", "over", "estimator", "variance", "prediction", "policy", "selection")


def _plain_settings(term: Term, maker: Callable[..., Any]) -> dict[str, Any]:
    accepted = _parameters(maker)
    settings = {}
    for key, text in term.options.items():
        if key not in accepted:
            raise _unknown(f"setting of {term.name}", key, accepted, term.name)
        settings[key] = _value(key, text)
    return settings


def _value(key: str, text: str) -> Any:
    if key in WEIGHTING_SETTINGS:
        return build_weighting(_unbracketed(text))
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


def _unbracketed(text: str) -> str:
    return text[1:-1] if text.startswith("(") and text.endswith(")") else text


def _call(term: Term, maker: Callable[..., Any], positional: list[Any], settings: dict[str, Any]) -> Any:
    missing = [name for name, required in _parameters(maker).items() if required and name not in settings]
    if missing:
        raise SpecError(f"{term.name} needs {', '.join(missing)}, as in {term.name}:{missing[0]}=...")
    try:
        return maker(*positional, **settings)
    except TypeError as error:
        raise SpecError(f"{term.name}: {error}") from error


def _parameters(maker: Callable[..., Any]) -> dict[str, bool]:
    """The settings a sampler or weighting takes, each with whether it must be given."""
    target = getattr(maker, "func", maker)  # a functools.partial has its class there
    sources: list[Callable[..., Any]] = [target, *getattr(target, "option_sources", list)()]
    if inspect.isclass(target) and issubclass(target, Sampler):
        sources.append(Sampler)
    accepted: dict[str, bool] = {}
    collected = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for source in sources:
        for parameter in inspect.signature(source).parameters.values():
            if parameter.name not in ("process", "edges") and parameter.kind not in collected:
                accepted.setdefault(parameter.name, parameter.default is parameter.empty)
    return accepted


def _unknown(what: str, name: str, known: Iterable[str], spec: str) -> SpecError:
    known = sorted(set(known))
    close = difflib.get_close_matches(name, known, 1)
    meant = f": did you mean {close[0]!r}?" if close else "."
    return SpecError(f"in {spec!r}: unknown {what} {name!r}{meant} Known: {', '.join(known)}")
