"""What a comparison found, in plain sentences that say no more than its seeds allow."""

import math
from collections.abc import Sequence

from noisewise import recipes
from noisewise.samplers.gradient_variance import GradientVariance
from noisewise.samplers.learning import Learner
from noisewise.spec import build_process
from noisewise.study.outcome import Comparison, Outcome
from noisewise.study.summary import SEEDS, SIGNIFICANT, Summary, headline_images, metric_label, summarise

FLAT = 1e-3  # how much a density may differ between noise levels and count as uniform
ENOUGH = 5  # seeds; with fewer, even runs that all agree hardly give a small p


def findings(comparison: Comparison) -> list[str]:
    """A sentence for each sampler, for each that has not begun to learn, and for each run that failed or is not finished."""
    summaries = summarise(comparison)
    bases = {one.process: one for one in summaries if one.baseline}
    said = [
        f"{one.sampler}{_on(comparison, one.process)}: {_finding(one, bases.get(one.process))}"
        for one in summaries
        if not one.baseline or _early(one) or not one.seeds
    ]
    if all(one.baseline for one in summaries):
        said.append(f"{comparison.plan.baseline} alone: nothing to compare with" if summaries else "no run has begun yet")
    said += [sentence for one in summaries if (sentence := _too_few(comparison, one, bases.get(one.process)))]
    return said + _unlearned(comparison) + [_lost(comparison, one) for one in comparison.outcomes if one.status != "finished"]


def _too_few(comparison: Comparison, one: Summary, base: Summary | None) -> str | None:
    """A warning, if so many images cannot tell a sampler from the baseline, whatever the seed."""
    if base is None or one.baseline or one.metric is None:
        return None
    ends = {
        (run.sampler, run.seed): (run.final.distance, run.final.error)
        for run in comparison.outcomes
        if run.process == one.process and run.final is not None and run.final.metric == one.metric
    }
    largest = reach = 0.0  # over seeds: the gap, and two standard errors of it
    for seed in one.seeds:
        (mine, error), (theirs, other) = (ends.get((name, seed), (None, None)) for name in (one.sampler, base.sampler))
        if mine is None or theirs is None or error is None or other is None:
            continue
        gap, far = abs(mine - theirs), 2 * math.hypot(error, other)
        if not gap < far:
            return None
        largest, reach = max(largest, gap), max(reach, far)
    if not reach:
        return None
    return (
        f"{one.sampler}{_on(comparison, one.process)}: {comparison.plan.images:,} images cannot tell it from {base.sampler}: "
        f"{metric_label(one.metric)} differs by {largest:.3g} at most, and two standard errors of such a difference are "
        f"{reach:.3g}; more images (--images, --headline) can"
    )


def explanation(comparison: Comparison) -> str:
    """How to read the table."""
    summaries = summarise(comparison)
    name, what = baseline_name(summaries), judged_by(summaries)
    said = [
        f"Lower is better; ± is half the range over seeds. Runs are judged by {what} at the end of the budget.",
        f'"Over {name}" is the ratio to {name}\'s with the same seed, as a geometric mean over seeds.',
        f"\"To {name}'s final\" is when a run first had {name}'s last value, on straight lines between evaluations; in "
        "brackets how many times sooner. ≤: the first evaluation was there already.",
        f"Area is the mean of {what} over the budget.",
    ]
    if any(one.p is not None for one in summaries):
        said.append(
            "p is of a two-sided paired t-test on the logarithms of the ratios, after Holm's correction within a schedule. "
            f'"Better" and "worse" need p below {SIGNIFICANT:g} and {SEEDS} seeds: two can agree by chance. Bold is what was '
            "shown to be better."
        )
    if headline := headline_images(summaries):
        said.append(
            f"{what} of {headline:,} is of that many images, made at the end: on average it falls with their number, so "
            "compare it with figures of the same number only."
        )
    tested = [len(one.reached) for one in summaries if one.p is not None]
    if tested and min(tested) < ENOUGH:
        said.append(f"With {min(tested)} seeds any p is weak: {ENOUGH} or more are needed to tell small differences.")
    if any(one.failed and not one.baseline for one in summaries):
        said.append('A sampler with failed runs is never called "better": the others may be those that happened not to fail.')
    if any(one.failed and one.baseline for one in summaries):
        said.append(f'Nothing is called "worse" than {name}, some of whose runs failed.')
    if any(one.verdict == "one seed" for one in summaries):
        said.append("One seed is too few to judge anything.")
    return " ".join(said)


def baseline_name(summaries: Sequence[Summary]) -> str:
    """The baseline, by a name that fits into headings."""
    name = next((one.sampler for one in summaries if one.baseline), "baseline")
    return name if len(name) <= 12 else "baseline"


def judged_by(summaries: Sequence[Summary]) -> str:
    """What the values are."""
    return " and ".join(dict.fromkeys(metric_label(one.metric) for one in summaries)) or "held-out loss"


def p_text(p: float) -> str:
    """Three digits after the point."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def p_equals(p: float) -> str:
    """The same in a sentence: "p = 0.012"."""
    return f"p {'= ' * (p >= 0.001)}{p_text(p)}"


def _on(comparison: Comparison, process: str) -> str:
    return f" on {process}" if len({one.process for one in comparison.outcomes}) > 1 else ""


def _finding(one: Summary, base: Summary | None) -> str:
    if base is None or not one.reached:
        return one.verdict
    if one.baseline:
        return f"{_share(one, 'its own final value')}: its curve rises in places, so gains of that size may be noise"
    if one.verdict.startswith("no finite"):
        return one.verdict
    whose, what = f"{base.sampler}'s", judged_by([one])
    size = f"{what} {_mean(one)} against {_mean(base)}" if one.ratio is None else f"{one.ratio:.2f} times {whose} {what}"
    apart = "" if one.side_by_side else f"; not trained side by side with {base.sampler}, so their clocks are not compared"
    return f"{size} ({_certainty(one, base)}); {_share(one, f'{whose} final value')}{apart}"


def _certainty(one: Summary, base: Summary) -> str:
    """What the seeds allow to say."""
    seeds = len(one.reached)
    if one.verdict == "one seed":
        return "one seed: too few to judge"
    p = "" if one.p_adjusted is None else p_equals(one.p_adjusted)
    if one.verdict in ("better", "worse"):
        return f"{one.verdict}: {p} over {seeds} seeds{' only' * (seeds < ENOUGH)}"
    if one.verdict == "same":
        return f"the same in {seeds} seeds"
    if one.failed and one.verdict.startswith("lower"):
        return f"{one.verdict}, {p}: not called better, since {len(one.failed)} of its runs failed"
    if base.failed and one.verdict.startswith("higher"):
        return f"{one.verdict}, {p}: not called worse, since {len(base.failed)} of {base.sampler}'s runs failed"
    if seeds < ENOUGH and f" {seeds} of {seeds} " in one.verdict:
        return f"{one.verdict}, {p}: too few seeds to call it {'better' if 'lower' in one.verdict else 'worse'}"
    return f"{one.verdict}, {p}: no clear difference"


def _share(one: Summary, what: str) -> str:
    """When it had the baseline's final value, in shares of the baseline's budget."""
    there = [reached for reached in one.reached if reached.steps is not None]
    if len(there) < len(one.reached):
        return f"{what} reached in {len(there)} of {len(one.reached)} seeds" if there else f"{what} not reached"
    gains = ((one.speedup_steps, "steps"), (one.speedup_seconds, "seconds"))
    shares = [f"{100 / gain:.0f} % of its {unit}" for gain, unit in gains if gain is not None]
    most = "at most " if any(reached.at_most for reached in there) else ""
    return f"{what} after {most}{' and '.join(shares)}" if shares else f"{what} at the first evaluation"


def _early(one: Summary) -> bool:
    """Whether it reached the end's value early by more than a table shows."""
    return any(gain is not None and gain >= 1.005 for gain in (one.speedup_steps, one.speedup_seconds))


def _mean(one: Summary) -> str:
    return "unknown" if one.value is None else f"{one.value.mean:.4g}"


def _unlearned(comparison: Comparison) -> list[str]:
    """A sentence for each sampler that learns, if its draws were still uniform at the end of some of its runs."""
    still: dict[tuple[str, str], list[int]] = {}
    for one in comparison.outcomes:
        drawn = [(row["step"], row["density_by_level"]) for row in one.metrics() if "density_by_level" in row]
        if one.status == "finished" and drawn:
            step, density = drawn[-1]
            if max(density) - min(density) < FLAT:
                still.setdefault((one.sampler, one.process), []).append(step)
    return [
        f"{sampler}{_on(comparison, process)}: had not begun to learn, its draws were still uniform after {max(steps):,} "
        f"steps; a longer budget{_sooner(learners, max(steps))} would show what learning does"
        for (sampler, process), steps in still.items()
        if (learners := _learners(sampler, process))
    ]


def _learners(sampler: str, process: str) -> list[Learner]:
    """What learns in a spec's sampler: itself, or samplers inside it."""
    return [part for part in recipes.recipe(sampler, build_process(process)).sampler.modules() if isinstance(part, Learner)]


def _sooner(learners: Sequence[Learner], steps: int) -> str:
    """The settings that kept samplers from learning within so many steps."""
    found = {}
    for part in (getattr(learner, "estimator", learner) for learner in learners):
        warmup, every = getattr(part, "warmup", 0), getattr(part, "every", 1)
        rounds = part.table.bins if isinstance(part, GradientVariance) else 1  # it measures one stratum at a time
        if warmup > steps:
            found["a shorter warmup"] = warmup
        if every * rounds > steps or (warmup <= steps and steps // every * every < warmup):
            found["a smaller every"] = every
    named = " and ".join(f"{what} (now {value:,})" for what, value in found.items())
    return f", or {named}," if named else ""


def _lost(comparison: Comparison, one: Outcome) -> str:
    run = f"{one.sampler}{_on(comparison, one.process)}, seed {one.seed}"
    if one.failure is None:
        return f"{run}: not finished"
    at = "" if one.failure.step is None else f" at step {one.failure.step}"
    return f"{run}: failed{at}: {one.failure.message}"
