"""A tiny run with a disk that fails at every call in turn. After each failure `--resume` must end where an untouched run does,
bit for bit, with the same rows and the same files.

    python -m tests.training.chaos                  everything, some ten minutes
    python -m tests.training.chaos --kinds kill --every 5

    kill    the process is killed before call n (and in the middle of it, if it is a write)
    room    the disk is full from call n on (ENOSPC)
    fault   call n fails once (EIO)
    power   the power is cut after call n; only what was flushed survives
"""

import argparse
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from noisewise.training import checkpoint
from tests.training.chaos.power import Call, Disk, plant, read_journal
from tests.training.processes import ROOT, TINY, metrics, tensors

STEPS = 9
WORDS = ["train", *TINY, f"--steps={STEPS}", "--checkpoint.every=2", "--checkpoint.keep=2", "--log.every=1"]
WORDS += ["--log.samples_every=4", "--log.samples=4", "--log.sample_steps=2", "--sampler=adaptive:warmup=2,every=2", "--resume"]
SCENES = ("new", "resumed")  # from nothing, and from a run that was killed in its middle
KINDS = ("kill", "room", "fault", "power")


def compiled(into: Path) -> Path | None:
    """The shim as a library, or None where there is no C compiler."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    library = into / "chaos.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, Path(__file__).with_name("shim.c")], check=True)
    return library


class Chaos:
    """Runs cases, and says what was wrong."""

    def __init__(self, work: Path, server: subprocess.Popen) -> None:
        self.work, self.server = work.resolve(), server
        self.wrong: list[str] = []
        self.cases = 0
        self.calls: dict[str, int] = {}
        self.writes: dict[str, list[int]] = {}
        self.before: dict[str, Path | None] = {"new": None, "resumed": self._middle()}
        whole = self.folder("whole")
        self.train(whole)
        self.whole = self.seen(whole)

    # Runs -----------------------------------------------------------------------------------------------------------

    def folder(self, name: str) -> Path:
        """A fresh place; the run is in a folder of its own inside it."""
        place = self.work / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        return place / "run"

    def train(self, run: Path, mode: str = "", at: int = 0, error: int = 0, words: list[str] = WORDS) -> tuple[int, str]:
        """Train in a process of its own; its status and what it said."""
        said = self.work / "said.txt"
        case = {"words": [*words, f"--out={run}"], "said": str(said), "below": str(run), "journal": ""}
        if mode == "c":
            case["journal"] = str(self.work / "journal")
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps({**case, "mode": mode, "at": at, "error": error}) + "\n")
        self.server.stdin.flush()
        return int(json.loads(self.server.stdout.readline())["status"]), said.read_text(errors="replace")

    def _middle(self) -> Path:
        run = self.folder("middle")
        self.train(run, words=[*WORDS, "--steps=5"])
        (run / "samples" / "step-00000005.png").unlink()
        (run / "checkpoints" / "step-00000005").rename(run / "checkpoints" / "writing-step-00000005-1")  # as a kill leaves it
        return run

    def fresh(self, name: str, scene: str) -> Path:
        run = self.folder(name)
        if (before := self.before[scene]) is not None:
            shutil.copytree(before, run)
        return run

    @staticmethod
    def seen(run: Path) -> dict[str, object]:
        """What must be the same: weights, rows, and which files there are."""
        files = sorted(str(path.relative_to(run)) for path in run.rglob("*"))
        return {"tensors": tensors(run, STEPS), "rows": metrics(run), "files": files}

    def check(self, run: Path, case: str) -> None:
        """Resume, and compare with the run that nothing happened to."""
        self.cases += 1
        status, said = self.train(run)
        if status or "Traceback" in said:
            self.wrong.append(f"{case}: --resume ended with {status}: {said[-500:]}")
            return
        try:
            found = self.seen(run)
        except (OSError, ValueError) as error:
            self.wrong.append(f"{case}: {error}")
            return
        for what, value in self.whole.items():
            if found[what] != value:
                differing = f": {set(found[what]) ^ set(value)}" if what == "files" else ""  # type: ignore[arg-type]
                self.wrong.append(f"{case}: other {what}{differing}")

    # Cases ----------------------------------------------------------------------------------------------------------

    def count(self, scene: str) -> int:
        """How many calls an untouched run makes; its journal is kept."""
        if scene not in self.calls:
            run = self.fresh("counted", scene)
            self.train(run, "c")
            calls = [call for call in read_journal(self.work / "journal") if Path(call.path) != run.parent]
            self.calls[scene] = len(calls)
            self.writes[scene] = [number for number, call in enumerate(calls, 1) if call.what == "write"]
            (self.work / "journal").replace(self.work / f"journal-{scene}")
        return self.calls[scene]

    def kill(self, scene: str, numbers: list[int], mode: str) -> None:
        for at in numbers:
            run = self.fresh("killed", scene)
            status, said = self.train(run, mode, at)
            if status != -signal.SIGKILL:
                self.wrong.append(f"{scene}, killed before call {at}: it ended with {status}: {said[-300:]}")
            self.check(run, f"{scene}, killed {'in' if mode == 't' else 'before'} call {at}")

    def fail(self, scene: str, numbers: list[int], mode: str, error: int) -> None:
        for at in numbers:
            run = self.fresh("failed", scene)
            status, said = self.train(run, mode, at, error)
            case = f"{scene}, {errno.errorcode[error]} at call {at}{' and after' if mode == 'f' else ''}"
            if "Traceback" in said or status < 0 or (status and not said.strip()):
                self.wrong.append(f"{case}: it ended with {status}: {said[-500:]}")
            self.check(run, case)

    def power(self, scene: str, resume: Callable[[int], bool]) -> None:
        """Cut the power after each call of the journal; `resume` says after which of the different states to go on training."""
        self.count(scene)
        disk, states, place = Disk(self.work / "counted"), 0, self.work / "cut"
        if (before := self.before[scene]) is not None:
            _load(disk, before)
        known: set[int] = set()
        promised: set[str] = set()  # checkpoints that are there for good
        for number, call in enumerate(read_journal(self.work / f"journal-{scene}"), 1):
            disk.apply(call)
            for names in ("sure", "all"):
                found = disk.survivors(names)
                state = hash(frozenset(found.items()))
                if state in known:
                    continue
                known.add(state)
                states += 1
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()
                plant(found, place)
                case = f"{scene}, power cut after call {number} ({names} names)"
                self._check_claims(place / "run", promised, case)
                if resume(states):
                    self.check(place / "run", case)
            if call.what == "sync" and call.path.endswith("/checkpoints"):
                promised = {name for name in disk.survivors("sure") if re.fullmatch(r"run/checkpoints/step-\d{8}", name)}

    def _check_claims(self, run: Path, promised: set[str], case: str) -> None:
        """No checkpoint that was there for good is lost, and no row that one claims."""
        self.cases += 1
        steps = checkpoint.steps_in(run / "checkpoints")
        whole = [step for step in steps if checkpoint.is_whole(run / "checkpoints" / checkpoint.name_of(step))]
        lost = {int(name[-8:]) for name in promised} - set(whole)
        if lost and not (whole and max(whole) > max(lost)):  # an older one may have been removed for a newer one
            self.wrong.append(f"{case}: lost the checkpoints of steps {sorted(lost)}")
        rows = {json.loads(line)["step"] for line in _lines(run / "metrics.jsonl")}
        if whole and (missing := set(range(1, max(whole) + 1)) - rows):
            self.wrong.append(f"{case}: the checkpoint of step {max(whole)} is there, the rows of {sorted(missing)} are not")

    def run(self, kinds: list[str], every: int, seed: int = 0) -> None:
        """All kinds, at every n-th call of each scene."""
        rng = random.Random(seed)
        for scene in SCENES:
            calls = self.count(scene)
            chosen = partial(_every, rng, every, calls)
            if "kill" in kinds:
                self.kill(scene, chosen(), "k")
                self.kill(scene, self.writes[scene][rng.randrange(every) :: every], "t")
            if "room" in kinds:
                self.fail(scene, chosen(), "f", errno.ENOSPC)
            if "fault" in kinds:
                self.fail(scene, chosen(), "e", errno.EIO)
            if "power" in kinds:
                self.power(scene, lambda states: states % every == 0)


def _every(rng: random.Random, every: int, calls: int) -> list[int]:
    return list(range(1 + rng.randrange(every), calls + 1, every))


def _lines(path: Path) -> Iterator[str]:
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            try:
                json.loads(line)
            except ValueError:
                continue  # torn
            yield line


def _load(disk: Disk, run: Path) -> None:
    """What was on the disk before, for good."""
    for path in [run, *sorted(run.rglob("*"))]:
        there = str(disk.root / "run" / path.relative_to(run))
        disk.apply(Call("mkdir" if path.is_dir() else "create", there, "0", b""))
        if path.is_file():
            disk.apply(Call("write", there, "0", path.read_bytes()))
    for path in [*sorted(run.rglob("*")), run]:
        disk.apply(Call("sync", str(disk.root / "run" / path.relative_to(run)), "", b""))
    disk.apply(Call("sync", str(disk.root), "", b""))


@contextmanager
def chaos() -> Iterator[Chaos | None]:
    """Ready to run cases; None where the shim cannot be made."""
    with tempfile.TemporaryDirectory(prefix="noisewise-chaos-") as place:
        work = Path(place)
        library = compiled(work)
        if library is None:
            yield None
            return
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(library)}
        env |= {"XDG_STATE_HOME": place}
        env.pop("NOISEWISE_TRACEBACK", None)
        command = [sys.executable, "-m", "tests.training.chaos.server", json.dumps(WORDS)]
        server = subprocess.Popen(command, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            yield Chaos(work, server)
        finally:
            server.kill()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--every", type=int, default=1, help="take every n-th call only")
    parser.add_argument("--seed", type=int, default=0, help="where to begin then")
    args = parser.parse_args()
    with chaos() as ready:
        if ready is None:
            print("no C compiler (cc, gcc or clang) on Linux: nothing was tried")
            return
        for kind in args.kinds:
            cases = ready.cases
            ready.run([kind], args.every, args.seed)
            print(f"{kind}: {ready.cases - cases} cases, {len(ready.wrong)} wrong so far", flush=True)
        print("\n".join(ready.wrong) or "all ended where an untouched run does")
        print(", ".join(f"{scene}: {calls} calls" for scene, calls in ready.calls.items()))
    sys.exit(bool(ready.wrong))


if __name__ == "__main__":
    main()
