"""What came of the runs, read back from their folders: the only thing that tables, tests, figures and reports look at.

comparison/
    comparison.json     what was asked for (`Plan`), and which runs belong to it
    runs/NAME/          ordinary run folders; evaluations are rows of metrics.jsonl with a "share" of the budget
        failure.json    why a run failed, if it did
        log.txt         what the run printed

Files are read with care: they may be damaged, edited, or of another version.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from noisewise.plain_files import read_lines, read_plain, replace_file
from noisewise.training.config import Config
from noisewise.training.options import as_yaml, load_config
from noisewise.training.run_folder import COMPARISON, settings_of

FORMAT = 1  # of comparison.json
PLAN, FAILURE, LOG = COMPARISON, "failure.json", "log.txt"
ROW: dict[str, Any] = {  # of training, as far as anything is drawn from it
    "step": int,
    "seconds": float,
    "loss": float | None,
    "gradient_norm": float | None,
    "loss_by_level": list[float | None],
    "density_by_level": list[float],
    "objective_by_level": list[float],
}


class NoneFinished(RuntimeError):
    """No run of a comparison has come to its end."""


@dataclass(frozen=True)
class Plan:
    """What a comparison was asked for."""

    name: str
    baseline: str  # the sampler that the others are compared with
    budget: str  # "150s" or "10000it"
    evaluate_at: tuple[float, ...]  # shares of the budget, increasing, the last one 1
    images: int  # generated for each evaluation
    runs: tuple[str, ...] = ()  # folders under runs/, in the order of tables
    command: tuple[str, ...] = ()  # the arguments that repeat it
    headline: int | None = None  # images of one more distance at the end of each run, such as the 50,000 of papers
    earlier: tuple[tuple[str, ...], ...] = ()  # other commands before that one, to which it has added runs
    launches: tuple[tuple[str, ...], ...] = ()  # the runs that each command trained, if that is known

    def write(self, folder: Path) -> None:
        """Write comparison.json."""
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / PLAN, json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @staticmethod
    def read(folder: Path) -> "Plan":
        """Read comparison.json; a ValueError says what is wrong with it."""
        path = folder / PLAN
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no comparison: it has no {PLAN}; give the --out of noisewise compare")
        with reading(path):
            values: dict[str, Any] = json.loads(read_plain(path))
            made = values.pop("format")
            if made != FORMAT:
                raise ValueError(f"its format is {made!r}, this version of noisewise reads {FORMAT}")
            plan = checked(Plan, {key: _tuples(value) for key, value in values.items()})
            if strange := [name for name in plan.runs if name in ("", ".", "..") or {"/", "\0"} & set(name)]:
                raise ValueError(f"{strange[0]!r} is no name of a run in runs/")
            return plan


def _tuples(value: Any) -> Any:
    """Lists of JSON, also in one another, as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class Evaluation:
    """One run, measured at one moment of training with its averaged weights."""

    share: float  # of the budget
    step: int
    seconds: float  # of training, the sampler's cost included
    images: int
    metric: str | None  # what `distance` is: fid, or digits-frechet for the embedded digits
    distance: float | None  # of generated images to the training data; None if there is none
    held_out: list[float]  # plain loss at equally spaced noise levels, least noise first
    vlb: float | None = None  # their mean with the weights of the variational bound, where the process has them
    picture: str | None = None  # of a few samples, relative to the run's folder
    headline_images: int | None = None
    headline: float | None = None  # the distance of so many; `distance` falls with their number, so the two are not compared
    error: float | None = None  # the standard error of `distance` for this number of images, at the end of a run

    def __post_init__(self) -> None:
        if not self.held_out:
            raise ValueError("an evaluation without held-out losses")

    @property
    def loss(self) -> float:
        """The mean over noise levels: what uniform sampling minimises."""
        return sum(self.held_out) / len(self.held_out)

    def row(self) -> dict[str, Any]:
        """As a row of metrics.jsonl."""
        return {"kind": "evaluation", **asdict(self)}


@dataclass(frozen=True)
class Failure:
    """Why a run ended before its budget did."""

    message: str
    step: int | None = None
    log: str = ""  # the last lines of what it printed


@dataclass(frozen=True)
class Outcome:
    """One run: its settings, its evaluations in order, and whether it failed."""

    folder: Path
    config: Config
    evaluations: list[Evaluation] = field(default_factory=list)
    failure: Failure | None = None

    @property
    def sampler(self) -> str:
        return self.config.sampler

    @property
    def process(self) -> str:
        return self.config.process

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def final(self) -> Evaluation | None:
        """The evaluation at the end of the budget, if it got there."""
        last = self.evaluations[-1] if self.evaluations else None
        return last if last is not None and last.share == 1 else None

    @property
    def status(self) -> str:
        """ "finished", "failed" or "unfinished"."""
        if self.final is not None:
            return "finished"
        return "unfinished" if self.failure is None else "failed"

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of training."""
        path = self.folder / "metrics.jsonl"
        rows = [row for row in objects(path) if "kind" not in row]
        with reading(path):
            for row in rows:
                if strange := [name for name, hint in ROW.items() if name in row and not fits(row[name], hint)]:
                    raise ValueError(f"a row of training whose {strange[0]} is not what a run writes")
                if not (0 <= row["step"] < 2**63 and 0 <= row["seconds"] < math.inf):
                    raise ValueError("a row of training whose step or seconds cannot be")
        return rows

    def environment(self) -> dict[str, Any]:
        """Versions and machine of its last start."""
        rows = objects(self.folder / "environment.jsonl")
        return rows[-1] if rows else {}


@dataclass(frozen=True)
class Comparison:
    """All runs of a comparison."""

    folder: Path
    plan: Plan
    outcomes: list[Outcome]

    def side_by_side(self, one: Outcome, other: Outcome) -> bool:
        """Whether two runs shared the machine, and its other work, so that their clocks can be compared."""
        alike = one.environment().get("machine") == other.environment().get("machine")
        together = any({one.folder.name, other.folder.name} <= set(names) for names in self.plan.launches)
        return alike and (together or not self.plan.launches)


def read_outcome(folder: Path) -> Outcome:
    """A run, from its folder alone."""
    file = settings_of(folder)
    with reading(file):
        config = load_config(file)
    file = folder / "metrics.jsonl"
    rows = [row for row in objects(file) if row.get("kind") == "evaluation" and "share" in row]
    known = Evaluation.__dataclass_fields__
    with reading(file):
        evaluations = [checked(Evaluation, {key: value for key, value in row.items() if key in known}) for row in rows]
    return Outcome(folder, config, sorted(evaluations, key=lambda found: found.share), read_failure(folder))


def write_failure(folder: Path, config: Config, failure: Failure) -> None:
    """Leave the reason where it will be found, also if the run got nowhere."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.yaml").is_file():
        replace_file(folder / "config.yaml", as_yaml(config))
    replace_file(folder / FAILURE, json.dumps(asdict(failure)) + "\n")


def read_failure(folder: Path) -> Failure | None:
    """Why a run failed, if it did."""
    path = folder / FAILURE
    if not path.is_file():
        return None
    with reading(path):
        return checked(Failure, json.loads(read_plain(path)))


def read_comparison(folder: Path) -> Comparison:
    """A comparison, from its folder alone; runs that have not begun are left out."""
    plan = Plan.read(folder)
    folders = [folder / "runs" / name for name in plan.runs]
    begun = [path for path in folders if (path / "config.yaml").is_file()]
    return Comparison(folder, plan, [read_outcome(path) for path in begun])


# Reading with care: files may be damaged, edited, or of another version -----------------------------------------------


Kind = TypeVar("Kind")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever is wrong with what the block reads becomes a ValueError that names the file."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        said = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} cannot be read: is it damaged, or of another version of noisewise? {said}") from error


def objects(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file, without what a kill has cut off."""
    lines = list(read_lines(path))
    with reading(path):
        for line in lines:
            if line.row is None and not line.text.lstrip().startswith(b"{"):
                raise ValueError(f"line {line.number}, {line.text[:40]!r}, is no row of it")
    return [line.row for line in lines if line.row is not None]


def checked(kind: type[Kind], values: dict[str, Any]) -> Kind:
    """A dataclass made of values from JSON, each of the kind that its field says."""
    made = kind(**values)
    for name, hint in get_type_hints(kind).items():
        if not fits(getattr(made, name), hint):
            raise TypeError(f"its {name} is {getattr(made, name)!r}")
    return made


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is what a type hint says: a plain type, a list or tuple of one, or one of several."""
    if isinstance(hint, UnionType):
        return any(fits(value, one) for one in get_args(hint))
    if inner := get_args(hint):
        return isinstance(value, get_origin(hint)) and all(fits(one, inner[0]) for one in value)
    if hint is float:
        return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)
    return isinstance(value, hint)
