"""Made-up specs, configurations and batches, and what must hold for each: sense, or one clear line.

    python -m tests.fuzz specs --count 2000 --seed 0

Each case is made from (seed, number) alone, so `--only 17` repeats one. tests/test_fuzz.py runs a few; `make fuzz` runs all.
"""

import argparse
import dataclasses
import io
import json
import math
import os
import random
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

import noisewise
from noisewise import spec as specs
from noisewise.commands import cli
from noisewise.objective import Objective
from noisewise.processes import PROCESSES
from noisewise.recipes import Recipe
from noisewise.samplers import SAMPLERS, Sampler
from noisewise.training.config import Config
from noisewise.weighting import WEIGHTINGS, Weighting

SLOW = 2.0  # seconds of this process
MEMORY = 3 * 2**30
ON = ["linear", "cosine", "linear:steps=10", "linear:steps=1", "quadratic:steps=4000", "flow", "edm", "vp", "ve"]
NUMBERS = [
    "0", "1", "-1", "2", "3", "5", "10", "17", "50", "100", "999", "1000", "1001", "1e3", "1e5", "1e6", "1e8", "1e9", "1e12",
    "1e18", "1e19", "1e30", "1e300", "1e308", "1e400", "1e-3", "1e-8", "1e-30", "1e-300", "1e-320", "0.01", "0.1", "0.5",
    "0.9", "0.99", "1.5", "0.999999", "nan", "inf", "-inf", "1e+3", "0x10", "1_000", "7.0", "true", "None", "٣",
]  # fmt: skip
WORDS = ["", " ", "loss", "reinforce", "lookahead", "u", "log_snr", "none", "true", "false", "unbiased", "target", "clipped(5)"]
WORDS += ["clipped(1e308)", "tempered(0.5)", "tempered(nan)", "stratified", "antithetic", "laplace", "normal", "cosine"]
WORDS += ["ü", "("]
WORDS += ["global", "grid", "correlation", "small", "/dev/null", "/nowhere/at/all.npy", ".", "\0", "\x1b[31m", "a" * 300]
MEANT = {
    "correction": ["none", "unbiased", "target", "clipped(3)", "tempered(0.5)", "clipped(1e9)"],
    "draws": ["independent", "stratified", "antithetic"],
    "estimator": ["loss", "reinforce", "lookahead"],
    "over": ["u", "log_snr"],
    "policy": ["global", "beta"],
    "selection": ["grid", "correlation", "f_statistic"],
    "variance": ["large", "small"],
    "shape": ["laplace", "normal", "linear", "cosine"],
}
PIECES = ["(", ")", "+", ",", ":", "=", "((", "))", "++", "mix:of=", "1e999", "%", "\n", "\0", "é", "adaptive", "minsnr"]
PIECES += ["::", "==", "-"]


def made_spec(rng: random.Random, depth: int = 0) -> str:
    """Names and settings that exist with values that need not; now and then broken text."""
    terms = []
    if rng.random() < 0.75 or depth:
        terms.append(_made_term(rng, rng.choice(list(SAMPLERS)), SAMPLERS, depth))
    weights = 0 if depth else rng.choice([0, 0, 1, 1, 2])
    terms += [_made_term(rng, rng.choice(list(WEIGHTINGS)), WEIGHTINGS, depth) for _ in range(weights)]
    text = "+".join(terms or ["uniform"])
    while not depth and rng.random() < 0.15:
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(PIECES) + text[at + rng.randrange(3) :]
    return text


def _made_term(rng: random.Random, name: str, registry: Any, depth: int) -> str:
    settings = []
    often = rng.choice([0.05, 0.1, 0.3])
    for key, parameter in specs._parameters(registry[name]).items():
        kinds = specs._kinds(parameter)
        needed = parameter.default is parameter.empty
        if key in specs.NOT_AS_TEXT or not (needed or rng.random() < often):
            continue
        if Sampler in kinds:
            value = f"({made_spec(rng, depth + 1)})" if depth < 4 else "uniform"
        elif Weighting in kinds:
            value = "(" + _made_term(rng, rng.choice(list(WEIGHTINGS)), WEIGHTINGS, depth) + ")"
        elif rng.random() < 0.08:
            value = rng.choice(NUMBERS + WORDS)
        elif str in kinds:
            value = rng.choice(MEANT.get(key, WORDS))
        elif rng.random() < 0.6:
            value = f"{rng.choice([-1, 1, 1, 1]) * 10 ** rng.uniform(-3, 3):.4g}"
            value = value if float in kinds else str(abs(int(float(value))))
        else:
            value = rng.choice(NUMBERS)
        settings.append(f"{key}={value}")
    return name + (":" + ",".join(settings) if settings else "")


def judged_spec(seed: int, number: int) -> tuple[str, str | None]:
    """A spec, and what is wrong with how it was taken; None if it was built and makes sense, or was refused in one line."""
    rng = random.Random(f"{seed} specs {number}")
    text = made_spec(rng)
    of = rng.choice(ON) if rng.random() < 0.8 else _made_term(rng, rng.choice(list(PROCESSES)), PROCESSES, 0)
    return f"{text!r} on {of}", _judged(lambda: _sense(noisewise.recipe(text, specs.build_process(of))))


def _judged(make: Callable[[], str | None]) -> str | None:
    began = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrong = make()
    except ValueError as error:
        wrong = _not_a_line(str(error))
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    took = time.process_time() - began
    return wrong or (f"took {took:.1f} s" if took > SLOW else None)


def _not_a_line(said: str) -> str | None:
    """Why a message is not one clear line."""
    if not said or len(said) > 1000 or "\n" in said or "\x1b" in said or "\0" in said:
        return f"not one clear line: {said[:200]!r}"
    return None


def _sense(recipe: Recipe, x0: Tensor | None = None) -> str | None:
    """What is nonsense about a recipe: draws, densities and weights of a batch, and draws against the density."""
    sampler = recipe.sampler
    x0 = torch.randn(4096, 2, generator=torch.Generator().manual_seed(0)) if x0 is None else x0
    draw = recipe.sample(x0[:64])
    for what, values, least in (("u", draw.u, 0.0), ("density", draw.density, 1e-30), ("weight", draw.weight, 0.0)):
        if not bool((torch.isfinite(values) & (values >= least)).all()):
            return f"{what} from {float(values.min())} to {float(values.max())}"
    if float(draw.u.max()) > 1 or float(draw.weight.sum()) <= 0:
        return "draws beyond 1, or no weight at all"
    u = sampler.sample(x0).u
    with torch.no_grad():
        weights = recipe.weighting.weights(recipe.objective, u)
    if not bool((torch.isfinite(weights) & (weights >= 0)).all()) or not float(weights.double().mean()) > 1e-20:
        return f"loss weights from {float(weights.min())} to {float(weights.max())}"
    if not sampler.conditional and not 0.95 <= (share := _integral(sampler, u)) <= 1.02:
        return f"the density integrates to {share:.3f} over 98 % of the draws"
    return None


def _integral(sampler: Sampler, u: Tensor) -> float:
    """Of the density, over where 98 % of the draws lie."""
    edges = u.double().sort().values[len(u) // 100 : -(len(u) // 100)]
    tables = [part.edges.double() for part in sampler.modules() if isinstance(part, noisewise.samplers.histogram.Histogram)]
    inner = torch.cat([edges, *tables])
    inner = inner[(inner >= edges[0]) & (inner <= edges[-1])].sort().values
    low, high = inner[:-1], inner[1:]
    between = sampler.density((low + (high - low) / 2).float()).double()
    return float((between * (high - low)).sum())


# Configurations --------------------------------------------------------------------------------------------------------

TINY = {
    "steps": 2,
    "batch": 4,
    "device": "cpu",
    "data.source": "digits",
    "model.name": "dit",
    "log.trackers": [],
    "model.options": {"patch": 4, "width": 8, "depth": 1, "heads": 2},
}
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 7, 0.5, -0.5, 1e-300, 1e300, 2**63, 10**30, math.nan, math.inf, "", "x", "nan", "1e5"),
    *("auto", "../x", "/dev/zero", "a\0b", "\x1b[31m", "é", [], [1], [1, 2], ["a"], [0.9, 0.999], {}, {"a": 1}, {1: 2}),
    *({"depth": 10**9}, {"width": -1}, {"patch": 0}, {"heads": 3}, {"size": "x"}),
    *("digits", "dit", "unet", "os:system", "adaptive+", "vp"),
]
BROKEN = ["\t", "{", "]", "&a *a", "!!python/object:os.system", "\x00", "\udcff", "- ", ": "]


def _settings(of: Any, at: str = "") -> Iterator[str]:
    """The dotted names of all settings."""
    for one in dataclasses.fields(of):
        inner = getattr(of, one.name)
        yield at + one.name
        if dataclasses.is_dataclass(inner):
            yield from _settings(inner, f"{at}{one.name}.")


def judged_configuration(seed: int, number: int) -> tuple[str, str | None]:
    """Settings of a tiny run, some of them odd, as a file or on the command line, and how `train --dry-run` took them."""
    rng = random.Random(f"{seed} configurations {number}")
    given: dict[str, Any] = dict(TINY)
    names = [name for name in _settings(Config()) if name not in ("name", "out")]
    for name in rng.sample(names, rng.choice([1, 1, 2, 3])):
        given[name] = rng.choice(ODD)
    text = yaml.safe_dump(given, allow_unicode=True)
    if rng.random() < 0.15:
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(BROKEN) + text[at:]
    with tempfile.TemporaryDirectory() as place:
        words = [f"--{name}={json.dumps(value)}" for name, value in given.items()]
        if rng.random() < 0.7:
            Path(place, "settings.yaml").write_bytes(text.encode(errors="surrogateescape"))
            words = ["--config", str(Path(place, "settings.yaml"))]
        return f"{given}", _judged_command(["train", "--dry-run", *words], place)


def _judged_command(words: list[str], place: str) -> str | None:
    said = io.StringIO()
    before = os.getcwd()
    os.chdir(place)
    began = time.process_time()
    try:
        with redirect_stdout(said), redirect_stderr(said), warnings.catch_warnings():
            status = cli.main(words)
    except SystemExit as error:
        status = error.code
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.chdir(before)
    took, text = time.process_time() - began, said.getvalue()
    if status not in (0, 1, 2) or "Traceback" in text or "\x1b" in text or (status and not text.strip()):
        return f"ended with {status}: {text[-300:]!r}"
    if status == 1 and len(text.strip().splitlines()) > 3 + text.count("warning"):
        return f"not one line: {text[-300:]!r}"
    return f"took {took:.1f} s" if took > 5 * SLOW else None


# Batches ---------------------------------------------------------------------------------------------------------------

LEARNERS = [
    "adaptive:warmup=2,every=2",
    "loss_adaptive:warmup=0,every=1",
    "loss_moment:bins=8,history=2",
    "loss_moment+minsnr",
    "adaptive:estimator=reinforce,every=2,strata=8,queue=3",
    "mix:of=(adaptive:warmup=0,every=1),floor=0.2+p2",
    "gradient_variance:strata=4,every=2,rows=4",
    "adaptive:estimator=lookahead,strata=3,horizon=1,budget=9,probe=8,warmup=1",
    "paper_cifar10:every=2,strata=20",
    "adaptive:warmup=0,every=1+learned",
    "uniform+minsnr",
    "adaptive:correction=clipped(3)",
]
POISONS = [math.nan, math.inf, -math.inf, 1e20, -1e20, 3e38, 1e15, 1e6, -1e6, 0.0, 1e-45, 1e-30]
MISSHAPEN: list[Callable[[Tensor], Any]] = [
    lambda losses: losses.mean(),
    lambda losses: losses[:-1],
    lambda losses: losses[None],
    lambda losses: losses.tolist(),
    lambda losses: losses.half(),
    lambda losses: losses.double(),
    lambda losses: losses.detach().long(),
    lambda losses: losses.detach().numpy(),
    lambda losses: None,
    lambda losses: losses * math.nan,
    lambda losses: losses * 0,
]


def judged_batch(seed: int, number: int) -> tuple[str, str | None]:
    """A loop of a few steps with one poisoned batch: refused in a line, or everything stays finite and a density."""
    rng = random.Random(f"{seed} batches {number}")
    spec, process = rng.choice(LEARNERS), rng.choice(["linear", "flow", "edm", "cosine:steps=50"])
    how = rng.choice(["losses", "losses", "shape", "data", "weights"])
    poison, change = rng.choice(POISONS), rng.randrange(len(MISSHAPEN))
    case = f"{spec} on {process}: {how}, {change if how == 'shape' else poison}"
    return case, _judged(lambda: _poisoned(rng, spec, process, how, poison, MISSHAPEN[change]))


def _poisoned(
    rng: random.Random, spec: str, process: str, how: str, poison: float, change: Callable[[Tensor], Any]
) -> str | None:
    objective = Objective(specs.build_process(process))
    recipe = noisewise.recipe(spec, objective)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    model = Straight()
    optimizer = torch.optim.SGD([*model.parameters(), *recipe.parameters()], lr=1e-3)
    recipe.attach(optimizer, model)
    bad = rng.randrange(2, 8)
    for step in range(10):
        x0 = torch.randn(8, 3, generator=generator)
        rows = rng.sample(range(8), rng.choice([1, 1, 2, 8]))
        if step == bad and how == "data":
            x0[rows] = poison
        draw = recipe.sample(x0)
        losses = objective.losses(model, x0, draw.u, torch.randn(8, 3, generator=generator))
        if step == bad and how == "losses":
            losses = torch.where(torch.isin(torch.arange(8), torch.tensor(rows)), poison, losses)
        if step == bad and how == "shape":
            losses = change(losses)
        try:
            loss = recipe.loss(draw, losses, lambda which, u, x0=x0: objective.losses(model, x0[which], u))
        except (TypeError, ValueError) as error:
            if wrong := _not_a_line(str(error)):
                return wrong
            optimizer.zero_grad()
            continue
        loss.backward()
        if not bool(torch.isfinite(loss)) or step in (bad, bad + 1):  # as any loop does that skips such steps
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        if step == bad and how == "weights":
            with torch.no_grad():
                kept = [one.clone() for one in model.parameters()]
                next(model.parameters()).fill_(poison)
        if step == bad + 1 and how == "weights":
            with torch.no_grad():
                for one, value in zip(model.parameters(), kept, strict=True):
                    one.copy_(value)
    for name, value in recipe.state_dict().items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            return f"{name} is not finite"
    recipe.detach()
    return _sense(recipe, torch.randn(4096, 3, generator=generator))


class Straight(nn.Module):
    """The least network."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, dtype=torch.float32)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.inner(x)


def run(kind: str, count: int, seed: int, only: int | None = None) -> list[str]:
    """What was wrong, a line a case."""
    found = []
    for number in range(count) if only is None else [only]:
        case, wrong = KINDS[kind](seed, number)
        if wrong:
            found.append(f"{kind} {number}: {case[:300]}: {wrong[:300]}")
    return found


KINDS: dict[str, Callable[[int, int], tuple[str, str | None]]] = {
    "specs": judged_spec,
    "configurations": judged_configuration,
    "batches": judged_batch,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one case, to repeat it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))  # what allocates without asking fails here, not the machine
    found = run(args.kind, args.count, args.seed, args.only)
    print("\n".join([*found, f"{args.kind}: {args.count} cases, {len(found)} wrong"]))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
