"""Made-up specs, configurations and batches, and what must hold for each: sense, or one clear line.

    python -m tests.fuzz specs --count 2000 --seed 0

Each case is made from (seed, number) alone, so `--only 17` repeats one. tests/test_fuzz.py runs a few; `make fuzz` runs all.
"""

import argparse
import random
import resource
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import noisewise
from noisewise import spec as specs
from noisewise.processes import PROCESSES
from noisewise.recipes import Recipe
from noisewise.samplers import SAMPLERS, Sampler
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
WORDS += [
    "clipped(1e308)",
    "tempered(0.5)",
    "tempered(nan)",
    "stratified",
    "antithetic",
    "laplace",
    "normal",
    "cosine",
    "ü",
    "(",
]
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
PIECES = [
    "(",
    ")",
    "+",
    ",",
    ":",
    "=",
    "((",
    "))",
    "++",
    "mix:of=",
    "1e999",
    "%",
    "\n",
    "\0",
    "é",
    "adaptive",
    "minsnr",
    "::",
    "==",
    "-",
]


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


def _sense(recipe: Recipe) -> str | None:
    """What is nonsense about a recipe: draws, densities and weights of a batch, and draws against the density."""
    sampler = recipe.sampler
    x0 = torch.randn(4096, 2, generator=torch.Generator().manual_seed(0))
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


def run(kind: str, count: int, seed: int, only: int | None = None) -> list[str]:
    """What was wrong, a line a case."""
    found = []
    for number in range(count) if only is None else [only]:
        case, wrong = KINDS[kind](seed, number)
        if wrong:
            found.append(f"{kind} {number}: {case[:300]}: {wrong[:300]}")
    return found


KINDS: dict[str, Callable[[int, int], tuple[str, str | None]]] = {"specs": judged_spec}


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
