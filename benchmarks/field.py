"""The field: every method under the same conditions, several runs at a time on one GPU, with curves that survive a cut.

    python benchmarks/field.py --seeds 0,1 --json benchmarks/results/cifar10-v1-field.jsonl                       on a GPU
    python benchmarks/field.py --preset digits --steps 20 --images 32 --methods uniform,min-snr --out out/tiny    on a CPU

This is `noisewise compare --turns 1 --jobs WORKERS --budget STEPSit`: each run is a process of its own and an ordinary run
folder in `--out`, and `noisewise report OUT` draws them. Besides:

- methods have names (below); `--methods` takes names and specs, separated by commas;
- evaluations are copied to `--json` as they are made, a row each: distance, held-out loss by noise level, density and objective
  by level, also at some moments before if they change, steps a second, seconds, configuration, environment. A failed run leaves
  a row with its reason;
- runs that a file of earlier rows (`--done`, and `--json` itself) shows at the end of their budget are not made again;
- after `--limit-seconds` all runs save and end, at once unless they compile; the same command goes on with them while `--out`
  is there. An evaluation that was cut is made again then, so leave time for the last ones;
- the statistics of the real images are made once, while the runs compile, not by each of them.

Runs with several workers share the GPU: their iterations can be compared, their seconds cannot; rows say how many there were.
A row belongs to a `session`, the moment at which `--out` was begun: a run that was cut, and made again in another folder, has
rows of both. All settings of noisewise train can follow.
"""

import argparse
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rows import append, publishable, spec_now

from noisewise.commands.compare import shares
from noisewise.metrics.distances import choose_network, real_statistics
from noisewise.plain_files import read_rows
from noisewise.report.opening import counted
from noisewise.spec import split_specs
from noisewise.study.conduct import combinations, conduct
from noisewise.study.job import with_budget
from noisewise.study.launch import Local
from noisewise.study.outcome import Evaluation, Outcome, Plan, read_outcome
from noisewise.training.components import open_source
from noisewise.training.config import Config
from noisewise.training.options import dotted, flat, load_preset, plain
from noisewise.training.parallel import make_accelerator
from noisewise.training.signals import StopRequest

REPAIRED = "paper_cifar10:normalise=true,floor=0.2,target=(vlb:clip=5)"
METHODS = {
    "uniform": "uniform",
    "min-snr": "minsnr:gamma=5",
    "p2": "p2",
    "log-normal": "logit_normal",
    "laplace": "laplace",  # over log SNR
    "speed-derived": "speed:k=5+change_aware",  # tau from the schedule
    "speed-later": "speed:k=5,tau=700,mirror=true+change_aware:tau=700",  # the authors' later code
    "speed-published": "speed_published",  # their first code, and the baseline of arXiv 2411.09998
    "loss-moment": "loss_moment",  # importance weights by default
    "loss-log-snr": "loss_adaptive",  # Kingma & Gao, importance weights by default
    "gradient-variance": "gradient_variance",
    "loss-weighted": "adaptive:correction=none,draws=independent,floor=0.2,target=(minsnr:gamma=5)",  # p is the weighting
    "loss-weighted-unbiased": "adaptive:draws=independent,floor=0.2+minsnr:gamma=5",  # w / (T p): the objective stays Min-SNR
    "adaptive-paper": "paper_cifar10",
    "adaptive-released": "released_cifar10",  # what the paper's code does instead
    "adaptive-repaired": REPAIRED,
    "adaptive-min-snr": f"{REPAIRED}+minsnr:gamma=5",
    "loss-plain": "adaptive:draws=independent,floor=0.2+none",  # p by the loss alone, the plain objective
    "adaptive": "adaptive",  # the default: loss-weighted-unbiased with stratified draws and a larger floor
}
EARLIER = {  # rows of methods whose specs meant something else then: `rows.spec_now`
    f"{name}, earlier": spec_now({"session": "2026-11-17", "sampler": spec})
    for name, spec in {
        "speed-released": "speed:k=5,tau=700,mirror=true+change_aware",  # mirrored at 700, the weight cut at 641
        "adaptive-paper": "paper_cifar10",
        "adaptive-repaired": REPAIRED,
        "adaptive-min-snr": f"{REPAIRED}+minsnr:gamma=5",
    }.items()
}
COPIED = ("density_by_level", "objective_by_level", "effective_share")  # from the row of training before an evaluation
MOMENTS = 10  # of what is drawn between two evaluations, if it changes; the last is that of the evaluation itself
ASKED = ("name", "process", "prediction", "sampler", "seed", "steps", "settings", "images")  # what tells a run from others
ELSEWHERE = ("out", "data", "device", "fast", "compile", "log", "checkpoint")  # settings that change no result beyond rounding
FIRST_DEFAULTS = {"model.name": "unet", "ema.ramp": False}  # defaults as they were when the first digests were made
PAUSE = 3.0  # seconds between two looks at the runs


def main() -> None:
    args, rest = options().parse_known_args()
    config = with_budget(load_preset(args.preset, *rest), f"{args.steps}it")
    named = chosen(args.methods)
    schedules = split_specs(config.process if args.schedules is None else args.schedules)
    configs = [
        one
        for seed in whole_numbers(args.seeds)
        for one in combinations(replace(config, seed=seed), list(named.values()), schedules, 1, args.out)
    ]
    known = [row for path in (*args.done, args.json) if path is not None for row in read_rows(path)]
    ended = {key(row) for row in known if row.get("share") == 1 and args.headline in (None, row.get("headline_images"))}
    left = [one for one in configs if key(about(one, args.images)) not in ended]
    print(f"{counted(len(configs), 'run')}, {len(configs) - len(left)} of them in the files already")
    if not left:
        return
    plan = Plan(
        name=config.name,
        baseline=next(iter(named.values())),
        budget=f"{args.steps}it",
        evaluate_at=shares(args.evaluate_at),
        images=args.images,
        headline=args.headline,
    )
    collector = Collector(left, args, {spec: name for name, spec in named.items()}, known)
    with StopRequest() as stop, prepared(config):
        timer = threading.Timer(args.limit_seconds or threading.TIMEOUT_MAX, request, (stop,))
        timer.daemon = True
        timer.start()
        with collector:
            conduct(plan, left, Local(turns=1, jobs=args.workers), stop=stop)
        timer.cancel()
    if stop.requested:
        print(f"{stop.name}: all runs are saved, and the same command goes on")
    print("\n" + table([*known, *collector.rows], plan.evaluate_at))


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--preset", default="cifar10-small")
    parser.add_argument("--methods", default=",".join(METHODS), help="names and specs; default: all of " + ", ".join(METHODS))
    parser.add_argument("--schedules", help="processes, separated by commas; default: that of the preset")
    parser.add_argument("--seeds", default="0,1", help="in this order: all methods with the first, then with the next")
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--evaluate-at", default="0.25,0.5,0.75,1", help="shares of the steps")
    parser.add_argument("--images", type=int, default=5000, help="generated for each evaluation")
    parser.add_argument("--headline", type=int, help="images of one more distance at the end of each run")
    parser.add_argument("--workers", type=int, default=3, help="runs at the same time")
    parser.add_argument("--limit-seconds", type=float, help="then save and end")
    parser.add_argument("--out", type=Path, default=Path("out/field"), help="the folder of the runs")
    parser.add_argument("--json", type=Path, help="append a row for each evaluation to this file")
    parser.add_argument("--done", type=Path, action="append", default=[], help="rows of earlier sessions; may be repeated")
    return parser


def chosen(text: str) -> dict[str, str]:
    """Names with their specs; what is no name is a spec and stands for itself."""
    return {one: METHODS.get(one, one) for one in split_specs(text)}


def whole_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--seeds {text!r}: give whole numbers separated by commas, as in 0,1") from None


def request(stop: StopRequest) -> None:
    stop.name = stop.name or "--limit-seconds"


class Over(Exception):
    """Nobody needs the statistics any more."""


@contextmanager
def prepared(config: Config) -> Iterator[None]:
    """Meanwhile statistics of the real images go into the cache, where every run will look for them."""
    over = threading.Event()

    def look(_: int) -> None:
        if over.is_set():
            raise Over

    thread = threading.Thread(target=prepare, args=(config, look), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()  # a process that ends while torch computes in a thread aborts


def prepare(config: Config, look: Callable[[int], None]) -> None:
    """Make the statistics; `look` is called again and again, and may raise Over."""
    source, device = open_source(config), make_accelerator(config).device
    if source.image:
        try:
            real_statistics(source, choose_network(source, device), device, progress=look)
        except FileNotFoundError as error:
            print(f"no FID: {error}")
        except Over:
            pass


def about(config: Config, images: int) -> dict[str, Any]:
    """What tells a run from others, whichever session it was made in."""
    found: dict[str, Any] = {name: getattr(config, name) for name in ASKED if name not in ("settings", "images")}
    return {**found, "settings": settings_of(plain(config)), "images": images}


def settings_of(config: dict[str, Any]) -> str:
    """A digest of all other settings that are not at their defaults: a setting that is new since then changes nothing."""
    usual = {**flat(Config()), **FIRST_DEFAULTS}
    others = {
        name: value
        for name, value in dotted(config).items()
        if name.partition(".")[0] not in (*ASKED, *ELSEWHERE) and value != usual.get(name)
    }
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()[:8]


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """The same as something to look up, in a row that was published, whenever that was, and in one that is not yet."""
    now = {**row, "sampler": spec_now(row)}
    if "config" in row:
        now["settings"] = settings_of(row["config"])
    return tuple(publishable(now.get(name)) for name in ASKED)


# Rows -------------------------------------------------------------------------------------------------------------------


class Collector:
    """Copies what the runs leave in their folders into rows, while they work."""

    def __init__(
        self, configs: list[Config], args: argparse.Namespace, names: dict[str, str], known: list[dict[str, Any]]
    ) -> None:
        self.configs, self.args, self.names = configs, args, names
        self.session = session_of(args.out)
        self.rows: list[dict[str, Any]] = []
        self._known = {self._label(row) for row in known}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Collector":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self.look()

    def _watch(self) -> None:
        while not self._over.wait(PAUSE):
            self.look()

    def look(self) -> None:
        """Write down what is new."""
        for config in self.configs:
            folder = Path(config.out or "")
            if not (folder / "config.yaml").is_file():
                continue
            try:
                found = rows_of(read_outcome(folder))
            except (ValueError, FileNotFoundError):  # just being written
                continue
            for row in found:
                self._add({"method": self.names[config.sampler], **about(config, self.args.images), **row})

    def _add(self, row: dict[str, Any]) -> None:
        row |= {"session": self.session, "workers": self.args.workers}
        if self._label(row) in self._known:
            return
        self._known.add(self._label(row))
        self.rows.append(row)
        print(line(row), flush=True)
        if self.args.json:
            append(self.args.json, row)

    @staticmethod
    def _label(row: dict[str, Any]) -> tuple[Any, ...]:
        return (*key(row), row.get("session"), row.get("share"), publishable(row.get("failed")))


def session_of(out: Path) -> str:
    """When the folder was begun, in UTC."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "session"
    if not file.exists():
        file.write_text(datetime.now(UTC).isoformat(timespec="seconds"))
    return file.read_text()


def rows_of(outcome: Outcome) -> list[dict[str, Any]]:
    """A row for each evaluation, and one for a failure."""
    training = outcome.metrics()
    settings = {"config": plain(outcome.config), "environment": outcome.environment()}
    starts = [0, *(one.step for one in outcome.evaluations)]
    rows = [
        {**evaluation_row(one, [row for row in training if row["step"] <= one.step], start), **settings}
        for start, one in zip(starts, outcome.evaluations, strict=False)
    ]
    if outcome.status == "failed" and outcome.failure is not None:
        rows.append({"failed": outcome.failure.message, "step": outcome.failure.step, "log": outcome.failure.log, **settings})
    return rows


def evaluation_row(one: Evaluation, before: Sequence[dict[str, Any]], start: int) -> dict[str, Any]:
    """An evaluation with its mean loss, its speed, and what the rows of training before it say of the draws since `start`."""
    drawn: dict[str, Any] = {name: before[-1].get(name) for name in COPIED} if before else {}
    since = [row for row in before if row["step"] > start]
    if any(row.get(COPIED[0]) != drawn[COPIED[0]] for row in since):
        every = -(-len(since) // MOMENTS)
        drawn["through"] = [
            {name: row.get(name) for name in ("step", "seconds", *COPIED)} for row in since[:-1][every - 1 :: every]
        ]
    row = {name: value for name, value in one.row().items() if name not in ("kind", "picture")}
    speed = round(one.step / one.seconds, 3) if one.seconds else None
    return {**row, "loss": one.loss, "steps_per_second": speed, **drawn}


# Words ------------------------------------------------------------------------------------------------------------------


def line(row: dict[str, Any]) -> str:
    name = f"{time.strftime('%H:%M:%S')}  {row['process']} {row['method']:24s} seed {row['seed']}"
    if "failed" in row:
        return f"{name}  failed: {row['failed']}"
    value = f"{row['metric']} {row['distance']:8.3f}" if row["distance"] is not None else ""
    if row["headline"] is not None:
        value += f"  {row['headline']:8.3f} of {row['headline_images']:,}"
    return f"{name}  {row['share']:4.0%}  {value}  loss {row['loss']:.5f}  {row['steps_per_second']} it/s"


def table(rows: list[dict[str, Any]], at: tuple[float, ...]) -> str:
    """The distance at each share of the steps, a line for each run, from its newest session; lowest end first."""
    curves: dict[tuple[Any, ...], dict[float, float]] = {}
    names: dict[tuple[Any, ...], str] = {}
    for row in sorted((row for row in rows if "share" in row), key=lambda row: row["session"]):
        value = row["loss"] if row["distance"] is None else row["distance"]
        curves.setdefault(key(row), {})[row["share"]] = value
        names[key(row)] = f"{row['process']:10s} {row['method']:24s} seed {row['seed']} {row['steps']:7d} steps"
    ordered = sorted(curves, key=lambda one: (one[:3], curves[one].get(1, float("inf"))))
    cells = {one: [f"{curves[one][share]:9.3f}" if share in curves[one] else f"{'-':>9s}" for share in at] for one in ordered}
    heading = " " * len(next(iter(names.values()), "")) + "".join(f"{share:>9.0%}" for share in at)
    return "\n".join([heading, *(names[one] + "".join(cells[one]) for one in ordered)])


if __name__ == "__main__":
    try:
        main()
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"field.py: {error}") from error
