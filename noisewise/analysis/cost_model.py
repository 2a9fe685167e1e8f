"""What a sampler costs, counted in samples that go through the model.

The unit is one sample forward. A training step of a batch B takes its samples forward and backward, and a backward pass is
about two forward ones (gradients of the inputs and of the weights), so it costs 3 B.

**The published method.** An update evaluates, before and after an optimizer step,

    all T noise levels of one sample                    T samples, T / B batches
    the |S| chosen levels of every sample              |S| B samples, |S| batches

and so takes 2 |S| + 2 T / B batches forward, once in f_S steps. Over a training step of 3 batches that is

    overhead = 1 + (2 |S| + 2 T / B) / (3 f_S)

For its settings on CIFAR-10 (T = 1000, B = 128, |S| = 3, f_S = 40) an update is 21.6 batches forward, 0.54 a step, and the
overhead 1.18 (an H200 measured 1.17: benchmarks/results/step_cost.jsonl).

**The paper's own account** (arXiv 2411.09998, section 9) is 1.41, in forward passes of the model: a backward pass is taken as
three, so a training step as 4; the policy's forward pass as one, at every step; an update as 2 |S| + 2 T / B and 4 for a
training step of the policy. With an update of 21.6 rounded to 21

    (4 + 1 + (21 + 4) / 40) / 4 = 5.63 / 4 = 1.41        (5.64 / 4 = 1.41 without rounding)

and 1.5 in practice. The difference to 1.18 is the policy, which is counted as dear as the model: 0.28 of the 0.41.

**Our samplers**, at one update:

    loss, static ones       nothing
    reinforce               2 (K + |S| B) forward for K strata; the published method if K = T
    lookahead               K n B forward and backward (n trial steps for each stratum), (K + 1) probes forward
    gradient_variance       2 m forward and backward, m rows or half of the batch if that is less

Forward passes are made in equal calls of limited size; the last one is filled up, which is counted here too. Once in a run
reinforce evaluates a third time, to see whether noise is paired: not counted.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from noisewise.samplers import AdaptiveSampler, GradientVariance, Sampler
from noisewise.samplers.adaptive.estimator import LossEstimator
from noisewise.samplers.adaptive.lookahead import LookaheadEstimator
from noisewise.samplers.adaptive.paper import PaperEstimator
from noisewise.samplers.adaptive.reinforce import ReinforceEstimator

BACKWARD = 3.0
"""A sample forward and backward, in samples forward."""
PAPER_STEP = 4.0
"""A training step in forward passes, as section 9 of arXiv 2411.09998 has it."""


@dataclass(frozen=True)
class Cost:
    """Samples through the model at one update, and the steps from one update to the next."""

    forward: int = 0  # forward alone
    trained: int = 0  # forward and backward
    every: int = 1

    def a_step(self, step: float = BACKWARD) -> float:
        """In samples forward, spread over all steps, where a trained sample costs `step` of them."""
        return (self.forward + step * self.trained) / self.every

    def overhead(self, batch: int, step: float = BACKWARD) -> float:
        """The time of a step over that of a plain one with this batch."""
        return 1 + self.a_step(step) / (step * batch)


def update(steps: int, batch: int, chosen: int = 3) -> float:
    """An update of the published method, in forward passes of a batch: T `steps`, |S| `chosen`."""
    return 2 * chosen + 2 * steps / batch


def by_samples(steps: int, batch: int, chosen: int = 3, every: int = 40, step: float = BACKWARD) -> float:
    """Its overhead in samples through the model; f_S is `every`, `step` a training step in forward passes."""
    return 1 + update(steps, batch, chosen) / (every * step)


def published(steps: int, batch: int, chosen: int = 3, every: int = 40, rounded: bool = False) -> float:
    """A step with the sampler in forward passes, as section 9 counts them; over `PAPER_STEP` it is the paper's overhead."""
    passes = update(steps, batch, chosen)
    return PAPER_STEP + 1 + ((math.floor(passes) if rounded else passes) + PAPER_STEP) / every


def samplers_in(sampler: Sampler) -> Iterator[Sampler]:
    """A sampler and those it is made of."""
    yield from (part for part in sampler.modules() if isinstance(part, Sampler))


def cost(sampler: Sampler, batch: int) -> Cost:
    """What one sampler sends through the model at an update (of those inside it nothing: see `costs`)."""
    if isinstance(sampler, GradientVariance):
        return Cost(trained=2 * max(min(sampler.rows, batch // 2), 1), every=sampler.every)
    if not isinstance(sampler, AdaptiveSampler):
        return Cost()
    estimator, strata = sampler.estimator, sampler.table.bins
    if isinstance(estimator, PaperEstimator):  # the two parts one after the other
        most = estimator.probe_batch or 8 * batch
        return Cost(forward=2 * (filled(strata, most) + filled(estimator.chosen * batch, most)), every=estimator.every)
    if isinstance(estimator, ReinforceEstimator):
        probes = strata + estimator.chosen * batch
        return Cost(forward=2 * filled(probes, estimator.probe_batch or 8 * batch), every=estimator.every)
    if isinstance(estimator, LookaheadEstimator):
        probes = (strata + 1) * filled(estimator.probe, 8 * batch)
        return Cost(probes, strata * estimator.horizon * batch, estimator.interval(batch))
    return Cost(every=estimator.every if isinstance(estimator, LossEstimator) else 1)


def costs(sampler: Sampler, batch: int) -> list[Cost]:
    """Of a sampler and of all those inside it."""
    return [cost(part, batch) for part in samplers_in(sampler)]


def overhead(sampler: Sampler, batch: int, step: float = BACKWARD) -> float:
    """Predicted time of a training step over that of uniform sampling."""
    return 1 + sum(one.overhead(batch, step) - 1 for one in costs(sampler, batch))


def filled(samples: int, most: int) -> int:
    """Samples of equal calls with at most so many each, the last call filled up."""
    calls = -(-samples // most)
    return calls * -(-samples // calls)


def hold(sampler: Sampler, update: bool) -> None:
    """Let the next step be one with an update, or one without: for measuring either, not for training."""
    for part in samplers_in(sampler):
        estimator = part.estimator if isinstance(part, AdaptiveSampler) else None
        if isinstance(estimator, LookaheadEstimator):
            estimator.next_event = 0 if update else 2**62
        elif isinstance(estimator, ReinforceEstimator | LossEstimator):
            beyond = estimator.every * (1 + getattr(estimator, "warmup", 0))  # a step at which an update has just been made
            part.step = beyond - 1 if update else beyond
        elif isinstance(part, GradientVariance):
            part.step = part.every * (1 + part.step // part.every) if update else part.every * (part.step // part.every) + 1


def interval(sampler: Sampler, batch: int) -> int:
    """Steps from one update to the next; 1 for samplers whose steps are all alike."""
    found = {one.every for one in costs(sampler, batch)} - {1}
    if len(found) > 1:
        raise ValueError(
            f"this sampler holds others that are updated every {min(found)} and {max(found)} steps: take one of them"
        )
    return found.pop() if found else 1
