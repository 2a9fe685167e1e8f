"""Run a worker in two real processes and read what each rank wrote: as a script under torchrun, or forked from a process that
has imported torch, where it is the library that is looked at and not how its processes begin.

gloo workers sometimes abort at exit after correct results, so it is the results that count, not the exit code.
"""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.training.processes import IMPORTED


def run_ranks(script: Path, out: Path, *args: str, ranks: int = 2, timeout: int = 300) -> list[dict]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={ranks}",
        "--standalone",
        str(script),
        str(out),
        *args,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    return written(out, ranks, f"torchrun said:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")


def fork_ranks(main: Callable[..., None], out: Path, *args: str, ranks: int = 2, timeout: int = 300) -> list[dict]:
    """`main(out, *args)` on each rank, with what torchrun would have put into its environment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [context.Process(target=_rank, args=(main, rank, ranks, port, out, args)) for rank in range(ranks)]
    end = time.monotonic() + timeout
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        process.kill()
        process.join()
    said = [log.read_text()[-6000:] for rank in range(ranks) if (log := out / f"rank{rank}.txt").exists()]
    return written(out, ranks, "the ranks said:\n" + "\n".join(said))


def _rank(main: Callable[..., None], rank: int, ranks: int, port: int, out: Path, args: tuple[str, ...]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the server it is forked from ignores it
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"})
    log = os.open(out / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch

    torch.set_num_threads(1)
    main(out, *args)


def written(out: Path, ranks: int, said: str) -> list[dict]:
    results = [out / f"rank{rank}.json" for rank in range(ranks)]
    missing = [result.name for result in results if not result.exists()]
    assert not missing, f"{missing} not written; {said}"
    return [json.loads(result.read_text()) for result in results]
