"""What a report is about: a comparison, or one run as a comparison with nothing."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from noisewise.looking.palette import Method, methods_named
from noisewise.metrics.optimal_loss import FILE, OptimalLoss, load_optimal_loss
from noisewise.study.outcome import PLAN, Comparison, Outcome, Plan, objects, read_comparison, read_outcome


@dataclass(frozen=True)
class Subject:
    """A comparison, with a look for each of its methods."""

    comparison: Comparison
    single: bool = False  # one run alone

    @property
    def folder(self) -> Path:
        return self.comparison.folder

    @property
    def plan(self) -> Plan:
        return self.comparison.plan

    @cached_property
    def methods(self) -> list[Method]:
        """The samplers, the baseline first."""
        names = [self.plan.baseline, *(run.sampler for run in self.comparison.outcomes)]
        return list(methods_named(list(dict.fromkeys(names))).values())

    @property
    def baseline(self) -> Method:
        return self.methods[0]

    @cached_property
    def schedules(self) -> list[str]:
        """The processes, in the order of the plan."""
        return list(dict.fromkeys(run.process for run in self.comparison.outcomes))

    @cached_property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.comparison.outcomes})

    @cached_property
    def metric(self) -> str | None:
        """What runs are judged by; None is the held-out loss."""
        found = [found.metric for run in self.comparison.outcomes for found in run.evaluations if found.metric is not None]
        return found[0] if found else None

    def runs(self, process: str, sampler: str | None = None) -> list[Outcome]:
        """The runs on one schedule, of one sampler or of all."""
        return [run for run in self.comparison.outcomes if run.process == process and sampler in (None, run.sampler)]

    def methods_of(self, process: str) -> list[Method]:
        """The methods that were run on a schedule."""
        return [method for method in self.methods if self.runs(process, method.name)]

    def optimal(self, process: str) -> OptimalLoss | None:
        """The optimal loss on a schedule, if the comparison or one of its runs has it saved: all have the same data."""
        for folder in (self.folder, *(run.folder for run in self.comparison.outcomes)):
            if (folder / FILE).is_file():
                return load_optimal_loss(folder / FILE, self.runs(process)[0].config.objective())
        return None

    def measured(self) -> list[dict[str, Any]]:
        """For one run: what `noisewise evaluate` has written into its metrics."""
        rows = objects(self.folder / "metrics.jsonl") if self.single else []
        return [row for row in rows if row.get("kind") == "evaluation" and "share" not in row]


def read_subject(target: Path) -> Subject:
    """A comparison or a run, from its folder; errors say what is missing."""
    if not target.is_dir():
        raise FileNotFoundError(f"{target} is no folder: give that of a run, or the --out of noisewise compare")
    if not (target / PLAN).is_file() and not (target / "config.yaml").is_file():
        raise FileNotFoundError(
            f"{target} is neither a comparison (it has no {PLAN}) nor a run (it has no config.yaml): "
            "give the folder that noisewise compare or noisewise train wrote"
        )
    subject = _comparison(target) if (target / PLAN).is_file() else _run(target)
    if (
        not any(run.evaluations or run.failure or run.metrics() for run in subject.comparison.outcomes)
        and not subject.measured()
    ):
        what = "the run has not" if subject.single else "none of its runs has"
        raise ValueError(f"{target} has nothing to report yet: {what} written metrics; try again when training has begun")
    return subject


def _comparison(target: Path) -> Subject:
    comparison = read_comparison(target)
    if not comparison.plan.runs:
        raise ValueError(f"{target} is an empty comparison: its {PLAN} names no runs; start it again with noisewise compare")
    if not comparison.outcomes:
        raise ValueError(f"{target} has nothing to report yet: none of its {len(comparison.plan.runs)} runs has begun")
    return Subject(comparison)


def _run(target: Path) -> Subject:
    run = read_outcome(target)
    config = run.config
    budget = f"{config.steps}it" if config.seconds is None else f"{config.seconds:g}s"
    plan = Plan(config.name, config.sampler, budget, (1.0,), 0, (target.name,))
    return Subject(Comparison(target, plan, [run]), single=True)
