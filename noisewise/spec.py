"""Spec strings: one line names a sampler, a weighting and their settings.

    uniform                              a sampler
    minsnr:gamma=5                       a weighting, with the uniform sampler
    speed:k=5+change_aware               both
    logit_normal+minsnr:gamma=5          both, with a setting
    mix:of=(speed:k=5),floor=0.1         a sampler made of samplers, in brackets
    piecewise:stages=(0=uniform,500=speed)  samplers by step
    speed_published                      a published method with its own weight; +none: without it
    adaptive                             a learning sampler; this one trains Min-SNR's objective by default
    adaptive+p2                          the same with P2 as weighting and target; +none: no weight

Grammar: term ("+" term)*, term = name [":" key=value ("," key=value)*], value = number | true | false | none | word | (spec).
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args

from noisewise.objective import Objective
from noisewise.processes import PROCESSES, Process
from noisewise.samplers import ALIASES, SAMPLERS, Sampler
from noisewise.samplers.learning import Learner
from noisewise.weighting import WEIGHTINGS, NoWeight, Weighting, WeightProduct
from noisewise.words import printable, unknown

DEEPEST = 20  # brackets in one another
LONGEST = 4000  # characters


class SpecError(ValueError):
    """A spec string that cannot be understood; the message suggests what was meant."""

    def __init__(self, message: str, advice: str = "") -> None:
        # the message repeats what was written, which may hold anything; advice is ours, in lines of its own
        super().__init__(printable(message).replace("\n", "\\n") + advice)


@dataclass(frozen=True)
class Term:
    name: str
    options: dict[str, str]


def build_parts(
    spec: str, process: Process, objective: Objective | None, settings: dict[str, Any]
) -> tuple[Sampler, Weighting]:
    """The sampler and the weighting that a spec names; `settings` are settings of the sampler that the spec leaves open."""
    sampler_term, weighting = _terms(spec)
    inherited: dict[str, Any] = {"objective": objective}
    named = any(term.name in WEIGHTINGS for term in parse(spec))
    if named:  # "adaptive+none" asks for no weight, "adaptive" for its own
        inherited["weighting"] = weighting
    sampler = _sampler(sampler_term or Term("uniform", {}), process, settings, inherited)
    if sampler.comes_with is not None and not named:
        weighting = sampler.comes_with()
    return sampler, weighting


def build_weighting(spec: str) -> Weighting:
    """The weighting of a spec that names no sampler."""
    sampler_term, weighting = _terms(spec)
    if sampler_term is not None:
        raise SpecError(f"{spec!r} names the sampler {sampler_term.name}, but only a weighting can stand here")
    return weighting


def build_process(spec: str) -> Process:
    """The process that a spec such as "cosine" or "linear:steps=4000" names."""
    terms = parse(spec)
    if len(terms) != 1:
        raise SpecError(f"{spec!r} should name one process, as in linear:steps=1000")
    term = terms[0]
    if term.name not in PROCESSES:
        raise _unknown("process", term.name, PROCESSES, spec)
    maker = PROCESSES[term.name]
    return _call(term, maker, [], _plain_settings(term, maker))


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
            raise _unknown("sampler or weighting", term.name, [*SAMPLERS, *WEIGHTINGS], spec, listed=False)
    if len(weightings) > 1:
        return sampler_term, WeightProduct(*weightings)
    return sampler_term, weightings[0] if weightings else NoWeight()


def _sampler(term: Term, process: Process, common: dict[str, Any], inherited: dict[str, Any]) -> Sampler:
    """A sampler; the samplers inside it inherit the recipe's objective and, if they learn, its weighting."""
    maker = SAMPLERS[term.name]
    accepted = _parameters(maker)
    settings = {**{key: value for key, value in inherited.items() if key in accepted}, **common}
    inner = {key: text for key, text in term.options.items() if key in accepted and Sampler in _kinds(accepted[key])}
    plain = Term(term.name, {key: text for key, text in term.options.items() if key not in inner})
    settings.update(_plain_settings(plain, maker))
    for key, text in inner.items():
        if int in _kinds(accepted[key]):  # steps and samplers
            settings[key] = {
                step: _inner(term, f"{key}={one}", one, process, inherited) for step, one in _by_step(term, key, text).items()
            }
        else:
            settings[key] = _inner(term, f"{key}={text}", text, process, inherited)
    return _call(term, maker, [process], settings)


def _inner(term: Term, where: str, text: str, process: Process, inherited: dict[str, Any]) -> Sampler:
    """A sampler inside another."""
    inner_term, weighting = _terms(_unbracketed(text))
    if inner_term is None or not isinstance(weighting, NoWeight):
        raise SpecError(f"{term.name}: {where} should be a sampler alone; put weightings outside, after a +")
    return _sampler(inner_term, process, {}, inherited)


def _by_step(term: Term, key: str, text: str) -> dict[int, str]:
    """The specs of (0=uniform,5000=(speed:k=5)) by their steps."""
    stages: dict[int, str] = {}
    for one in _split(_unbracketed(text), ",", text):
        step, equals, spec = (part.strip() for part in one.partition("="))
        if not equals or not step.isdecimal() or not spec or int(step) in stages:
            raise SpecError(f"{term.name}: {key}={text} should be (step=sampler,...), as in (0=uniform,5000=(speed:k=5))")
        stages[int(step)] = spec
    return stages


def parse(spec: str) -> list[Term]:
    """The terms of a spec, not yet looked up."""
    if len(spec) > LONGEST:
        raise SpecError(f"{spec[:40]!r}...: a spec has at most {LONGEST} characters, and this one {len(spec)}")
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
        terms.append(Term(ALIASES.get(name.strip(), name.strip()), options))
    return terms


def split_specs(text: str) -> list[str]:
    """The specs of a list such as "uniform,adaptive:floor=0.1,every=20,p2"; a piece with = before any : goes on with a spec."""
    specs: list[str] = []
    for piece in _split(text, ",", text):
        if specs and "=" in piece.partition(":")[0]:
            specs[-1] += f",{piece.strip()}"
        else:
            specs.append(piece.strip())
    if not all(specs):
        raise SpecError(f"{text!r} has an empty place between its commas")
    return specs


def _split(text: str, separator: str, spec: str) -> list[str]:
    """Split at separators outside brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth < 0:
            break
        if depth > DEEPEST:
            raise SpecError(f"{spec[:40]!r}...: brackets lie more than {DEEPEST} deep in one another")
        if character == separator and depth == 0 and not _in_number(text, i):
            parts.append(text[start:i])
            start = i + 1
    if depth:
        raise SpecError(f"in {spec!r}: brackets do not match")
    return [*parts, text[start:]]


def _in_number(text: str, i: int) -> bool:
    """Whether the + at i belongs to a number such as 1e+3."""
    return text[i] == "+" and re.search(r"=-?[\d.]*\d[\d.]*[eE]$", text[:i]) is not None and text[i + 1 : i + 2].isdigit()


NOT_AS_TEXT = ("objective", "values", "weighting")
"""Settings that only Python can give, or that follow from the rest of the spec."""


def _plain_settings(term: Term, maker: Callable[..., Any]) -> dict[str, Any]:
    accepted = _parameters(maker)
    settings = {}
    for key, text in term.options.items():
        if key not in accepted or key in NOT_AS_TEXT:
            raise _unknown(f"setting of {term.name}", key, set(accepted) - set(NOT_AS_TEXT), term.name)
        settings[key] = _value(key, text, _kinds(accepted[key]))
    return settings


def _kinds(parameter: inspect.Parameter) -> tuple[Any, ...]:
    """The types a setting may have, and the values of a Literal; without an annotation those of its default, or numbers."""
    if parameter.annotation is not parameter.empty:
        return tuple(_flat(parameter.annotation))
    kind = type(parameter.default)
    return (kind,) if kind in (bool, str) else (float, *((NoneType,) if kind is NoneType else ()))


def _flat(annotation: Any) -> Iterator[Any]:
    """The types and values inside a union, at any depth."""
    inner = get_args(annotation)
    for one in inner:
        yield from _flat(one)
    if not inner:
        yield float if annotation is Any else annotation


def _value(key: str, text: str, kinds: tuple[Any, ...]) -> Any:
    if Weighting in kinds:
        return build_weighting(_unbracketed(text))
    if str in kinds:
        return text
    words: dict[str, Any] = {"true": True, "false": False} if bool in kinds else {}
    words |= {str(kind): kind for kind in kinds if isinstance(kind, (str, int))}  # of a Literal
    if NoneType in kinds:
        words["none"] = None
    if text in words:
        return words[text]
    if text.lower() in words:
        return words[text.lower()]
    numeric = bool({int, float} & set(kinds))
    number = _number(text) if numeric else None
    if number is None:
        expected = " or ".join([*(["a number"] if numeric else []), *words])
        raise SpecError(f"{key}={text}: expected {expected or 'what only Python can give'}")
    if int not in kinds or float in kinds:
        return number
    if number % 1 != 0:  # true of inf and nan as well
        raise SpecError(f"{key}={text}: expected a whole number")
    return int(number)  # 1e3 is one


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return None


def _unbracketed(text: str) -> str:
    return text[1:-1] if text.startswith("(") and text.endswith(")") else text


def _call(term: Term, maker: Callable[..., Any], positional: list[Any], settings: dict[str, Any]) -> Any:
    accepted = _parameters(maker)
    required = [name for name, parameter in accepted.items() if parameter.default is parameter.empty]
    missing = [name for name in required if name not in settings]
    if missing:
        raise SpecError(f"{term.name} needs {', '.join(missing)}, as in {term.name}:{missing[0]}=...")
    try:
        return maker(*positional, **settings)
    except TypeError as error:
        for name in settings:
            if name not in accepted and f"unexpected keyword argument {name!r}" in str(error):
                raise _unknown(f"setting of {term.name}", name, accepted, term.name) from None
        raise SpecError(f"{term.name}: {error}") from error


def _parameters(maker: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The settings a sampler or weighting takes."""
    target: Any = getattr(maker, "func", maker)  # a functools.partial has its class there
    if inspect.ismethod(target):  # DDPM.linear and the like take their own settings alone
        return dict(_signature(target).parameters)
    if not inspect.isclass(target):
        target = inspect.signature(target).return_annotation  # a preset takes what the class it returns takes
    sources: list[Any] = [target, *getattr(target, "option_sources", list)()]
    sources += [base for base in (Learner, Sampler) if issubclass(target, base)]
    accepted: dict[str, inspect.Parameter] = {}
    collected = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for source in sources:
        for parameter in _signature(source).parameters.values():
            if parameter.name not in ("process", "edges", "table") and parameter.kind not in collected:
                accepted.setdefault(parameter.name, parameter)
    return accepted


def _signature(source: Any) -> inspect.Signature:
    """With annotations as types, also where they are written as strings."""
    try:
        return inspect.signature(source, eval_str=True)
    except NameError as error:
        raise SpecError(
            f"the settings of {source.__name__} cannot be read, since its annotations name what is not there when it runs "
            f"({error}): import it outside of TYPE_CHECKING"
        ) from None


def _unknown(what: str, name: str, known: Iterable[str], spec: str, listed: bool = True) -> SpecError:
    return SpecError(f"in {spec!r}: " * (spec != name) + unknown(what, name, sorted(set(known)), listed))
