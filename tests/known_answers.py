"""Small problems whose right answer is known, to see whether an estimator finds it.

    python -m tests.known_answers [--json benchmarks/results/known_answers.jsonl]      what each estimator finds, honestly

`Strata`: K strata of u, each a quadratic with a gap to close and noise in its gradient, so that true gains of training more
of a stratum can be computed by brute force: train for real from the same state, over and over with fresh noise, and average.
"""

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path

import torch
from scipy import stats
from torch import Tensor, nn

from noisewise import AdaptiveSampler, Flow, Sampler, Uniform

BATCH = 64


class Strata(nn.Module):
    """Loss of a sample in stratum k: |mix_k theta - c_k - noise_k xi|^2 / 2d, with xi ~ N(0, 1) drawn anew in each call.

    Args:
        gaps: the distance of each stratum's optimum from the start.
        noise: the gradient noise of each stratum.
        mixing: (K, K); the identity gives each stratum its own parameters (the paper's Eq. 6), anything else shares them.
    """

    def __init__(self, gaps: Tensor, noise: Tensor, mixing: Tensor | None = None, width: int = 8) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(len(gaps), width))
        self.register_buffer("optimum", gaps[:, None] * torch.ones(width) / width**0.5)
        self.register_buffer("noise", noise)
        self.register_buffer("mixing", torch.eye(len(gaps)) if mixing is None else mixing)

    @property
    def strata(self) -> int:
        return len(self.noise)

    def residual(self) -> Tensor:
        return self.mixing @ self.theta - self.optimum

    def loss_at(self, rows: object, u: Tensor) -> Tensor:
        which = (u * self.strata).long().clamp(max=self.strata - 1)
        xi = torch.randn(len(u), self.theta.shape[1])
        return ((self.residual()[which] - self.noise[which, None] * xi) ** 2).sum(1) / 2

    @torch.no_grad()
    def excess(self) -> Tensor:
        """(K,) exact expected losses above what the noise alone costs."""
        return (self.residual() ** 2).sum(1) / 2


def independent() -> Strata:
    """Eight strata with different gaps and noises."""
    gaps = torch.tensor([0.3, 2.0, 1.0, 3.0, 0.6, 1.5, 2.5, 0.1])
    return Strata(gaps, torch.tensor([0.2, 0.2, 0.6, 0.3, 0.9, 0.1, 0.5, 0.3]))


def shared() -> Strata:
    """Neighbours pull on one another's parameters: training one stratum raises the losses of others (the paper's Fig. 4)."""
    k = 8
    distance = (torch.arange(k)[:, None] - torch.arange(k)).abs()
    mixing = torch.eye(k) - 0.35 * (distance == 1).float() + 0.1 * (distance == 2).float()
    return Strata(torch.tensor([0.3, 2.0, 1.0, 3.0, 0.6, 1.5, 2.5, 0.1]), torch.full((k,), 0.3), mixing)


def alike() -> Strata:
    return Strata(torch.full((8,), 1.5), torch.full((8,), 0.3))


class Run:
    """A problem being trained with a sampler."""

    def __init__(self, problem: Strata, sampler: Sampler, lr: float = 0.05, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.problem, self.sampler = problem, sampler
        self.optimizer = torch.optim.SGD(problem.parameters(), lr=lr)
        sampler.attach(problem, self.optimizer)
        self.x0 = torch.zeros(BATCH, 1)

    def steps(self, n: int) -> "Run":
        for _ in range(n):
            draw = self.sampler.sample(self.x0)
            losses = self.problem.loss_at(slice(None), draw.u)
            self.optimizer.zero_grad()
            (draw.weight * losses).mean().backward()
            with self.sampler.observe(draw, losses.detach(), self.problem.loss_at):
                self.optimizer.step()
        return self

    def mass(self) -> Tensor:
        """The share of the draws that each stratum of the problem gets."""
        fine = (torch.arange(self.problem.strata * 100) + 0.5) / (self.problem.strata * 100)
        return self.sampler.density(fine).view(self.problem.strata, 100).mean(1) / self.problem.strata


def exact_gains(problem: Strata, horizon: int, share: float, lr: float = 0.05, trials: int = 400, seed: int = 1) -> Tensor:
    """The decrease of the mean excess loss after `horizon` real steps, `share` of each batch from one stratum, else uniform."""
    torch.manual_seed(seed)
    before = problem.excess().mean()
    gains = torch.zeros(problem.strata)
    for stratum in range(problem.strata):
        for _ in range(trials):
            trial = copy.deepcopy(problem)
            optimizer = torch.optim.SGD(trial.parameters(), lr=lr)
            for _ in range(horizon):
                u = torch.rand(BATCH)
                inside = (stratum + torch.rand(BATCH)) / problem.strata
                u = torch.where(torch.rand(BATCH) < share, inside, u)
                optimizer.zero_grad()
                trial.loss_at(None, u).mean().backward()
                optimizer.step()
            gains[stratum] += before - trial.excess().mean()
    return gains / trials


def spearman(a: Tensor, b: Tensor) -> float:
    return float(stats.spearmanr(a.numpy(), b.numpy()).statistic)


def by_loss(problem: Strata, **settings) -> AdaptiveSampler:
    """The default on the plain objective: these problems have no noise levels for Min-SNR to weigh."""
    return AdaptiveSampler(Flow(), "loss", **{"strata": problem.strata, "correction": "unbiased", **settings})


def lookahead(problem: Strata, horizon: int = 1, **settings) -> AdaptiveSampler:
    settings = {"warmup": 0, "probe": 512, "budget": 0.5, "correction": "none", **settings}
    return AdaptiveSampler(Flow(), "lookahead", strata=problem.strata, horizon=horizon, **settings)


def lookahead_gains(problem: Strata, horizon: int) -> Tensor:
    """The gains of one event, at the problem's present parameters."""
    run = Run(copy.deepcopy(problem), lookahead(problem, horizon))
    return run.sampler.estimator.measure(run.sampler, BATCH, torch.device("cpu"), run.problem.loss_at)


def loss_scores(problem: Strata, steps: int = 100) -> Tensor:
    """What the loss estimator ranks by: the running losses, at frozen parameters."""
    run = Run(copy.deepcopy(problem), by_loss(problem, warmup=0), lr=0.0)
    return run.steps(steps).sampler.estimator.running.mean()


def reinforce_rewards(problem: Strata, updates: int = 60, lr: float = 0.05) -> Tensor:
    """What the paper's estimator is taught: the mean advantage of the draws in each stratum, at frozen parameters."""
    problem = copy.deepcopy(problem)
    sampler = AdaptiveSampler(Flow(), "reinforce", strata=problem.strata, every=1, policy="global", lr=1e-9, correction="none")
    run, seen = Run(problem, sampler, lr=lr), []
    learn = sampler.estimator._advantage
    sampler.estimator._advantage = lambda *args: seen.append(learn(*args)) or seen[-1]
    start, sums, counts = copy.deepcopy(problem.state_dict()), torch.zeros(problem.strata), torch.zeros(problem.strata)
    for _ in range(updates):
        draw = sampler.sample(run.x0)
        losses = problem.loss_at(slice(None), draw.u)
        run.optimizer.zero_grad()
        losses.mean().backward()
        n = len(seen)
        with sampler.observe(draw, losses.detach(), problem.loss_at):
            run.optimizer.step()
        problem.load_state_dict(start)
        if len(seen) > n:
            which = (draw.u * problem.strata).long()
            sums.index_add_(0, which, seen[-1])
            counts.index_add_(0, which, torch.ones(BATCH))
    return sums / counts


def final_excess(
    make: Callable[[Strata], Sampler], problem: Callable[[], Strata], steps: int, seeds: int, lr: float = 0.05
) -> float:
    """The mean excess loss over strata and seeds at the end of training."""
    runs = [Run(problem(), make(problem()), lr=lr, seed=seed).steps(steps) for seed in range(seeds)]
    return float(torch.stack([run.problem.excess().mean() for run in runs]).mean())


def report() -> list[dict]:
    rows = []
    for name, make in (("independent", independent), ("shared", shared)):
        for horizon in (1, 8):
            problem = make()
            truth = exact_gains(problem, horizon, 0.5)
            scores = {"lookahead": lookahead_gains(problem, horizon), "loss": loss_scores(problem)}
            scores["reinforce (60 updates)"] = reinforce_rewards(problem)
            for estimator, score in scores.items():
                rows.append(
                    {"problem": name, "horizon": horizon, "estimator": estimator, "spearman": round(spearman(score, truth), 3)}
                )
    return rows


def outcomes(steps: int = 400, seeds: int = 4) -> list[dict]:
    """How far each method gets on each problem, against uniform in the same number of steps."""
    makers: dict[str, Callable[[Strata], Sampler]] = {
        "uniform": lambda problem: Uniform(Flow()),
        "loss": lambda problem: by_loss(problem, warmup=20, every=10),
        "lookahead, horizon 1": lambda problem: lookahead(problem, 1),
        "lookahead, horizon 8": lambda problem: lookahead(problem, 8),
        "reinforce": lambda problem: AdaptiveSampler(Flow(), "reinforce", every=5, policy="global", correction="none"),
    }
    rows = []
    for problem in (independent, shared, alike):
        for lr in (0.05, 0.5):
            for name, make in makers.items():
                runs = [Run(problem(), make(problem()), lr=lr, seed=seed).steps(steps) for seed in range(seeds)]
                excess = torch.stack([run.problem.excess() for run in runs]).mean(0)
                row = {"problem": problem.__name__, "lr": lr, "sampler": name, "steps": steps, "seeds": seeds}
                variation = torch.stack([(run.mass() - 1 / 8).abs().sum() / 2 for run in runs]).mean()
                row |= {"mean excess": float(excess.mean()), "worst stratum": float(excess.max())}
                rows.append(row | {"distance from uniform": float(variation)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = report()
    print(f"{'problem':14s} {'true gains over':>16s}  {'estimator':26s} {'Spearman rho with the true gains':>32s}")
    for row in rows:
        print(f"{row['problem']:14s} {row['horizon']:10d} steps  {row['estimator']:26s} {row['spearman']:32.2f}")
    print(f"\n{'problem':14s} {'lr':>5s}  {'sampler':22s} {'mean excess':>12s} {'worst stratum':>14s} {'TV to uniform':>14s}")
    results = outcomes()
    for row in results:
        figures = f"{row['mean excess']:12.5f} {row['worst stratum']:14.5f} {row['distance from uniform']:14.3f}"
        print(f"{row['problem']:14s} {row['lr']:5.2f}  {row['sampler']:22s} {figures}")
    if args.json:
        rows += results
        args.json.write_text("".join(json.dumps({**row, "torch": torch.__version__}) + "\n" for row in rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
