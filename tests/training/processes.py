"""Real training processes for the fault tests: `python -m noisewise train` on a tiny model, begun afresh or forked."""

import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from noisewise.study.launch.local import PRELOADED

ROOT = Path(__file__).parent.parent.parent
IMPORTED = [*PRELOADED, "noisewise.commands.train"]  # by the process that others are forked from
TINY = [
    "--preset=digits",
    "--batch=16",
    "--model.name=dit",
    '--model.options={"patch": 4, "width": 16, "depth": 1, "heads": 2}',
    "--sampler=adaptive:warmup=20,every=10",
    "--log.every=10",
    "--log.trackers=[]",
    "--log.samples_every=0",
    "--device=cpu",
]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "NOISEWISE_TRACEBACK": "1"}


def start(out: Path, *options: str, ranks: int = 1, **settings) -> subprocess.Popen:
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone", "-m"]
    command = [*launcher, "noisewise", "train", *TINY, f"--out={out}", *options]
    return subprocess.Popen(
        command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **settings
    )


class Forked:
    """A training process forked from one that has imported everything, which takes three seconds. It is killed as any other;
    how a process begins and ends by itself is not the same, so that is looked at in those of `start`.
    """

    def __init__(self, out: Path, *options: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self.log = out.with_name(f"{out.name}.txt")
        self.process = context.Process(target=_train, args=([*TINY, f"--out={out}", *options], self.log))
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.process.join(timeout)
        assert self.process.exitcode is not None, "it hangs"
        return self.log.read_text() if self.log.exists() else "", None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _train(words: list[str], log: Path) -> None:
    """What a forked process does."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the server it is forked from ignores it
    os.environ.update(environment())
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    from noisewise.commands.cli import main

    sys.exit(main(["train", *words]))


def finish(process: subprocess.Popen | Forked, timeout: int = 240) -> str:
    """Wait for the end and return what was printed; kills it if it hangs."""
    try:
        return process.communicate(timeout=timeout)[0]
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()


def until(true: Callable[[], bool], seconds: float = 120) -> None:
    """Wait for something that will come true; the limit only ends a test that would hang."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def last_step(out: Path) -> int:
    """The newest checkpoint's step, 0 if there is none."""
    steps = [int(path.name.removeprefix("step-")) for path in (out / "checkpoints").glob("step-*")]
    return max(steps, default=0)


def tensors(out: Path, step: int) -> dict[str, str]:
    """A digest of every tensor file of a checkpoint."""
    folder = out / "checkpoints" / f"step-{step:08d}"
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}


def metrics(out: Path) -> list[dict]:
    """The rows of metrics.jsonl without what depends on the clock."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("seconds", "steps_per_second", "took")} for row in rows]
