"""Run a worker script in two real processes under torchrun and read what each rank wrote.

gloo workers sometimes abort at exit after correct results, so it is the results that count, not the exit code.
"""

import json
import os
import subprocess
import sys
from pathlib import Path


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
    results = [out / f"rank{rank}.json" for rank in range(ranks)]
    missing = [result.name for result in results if not result.exists()]
    assert not missing, f"{missing} not written; torchrun said:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return [json.loads(result.read_text()) for result in results]
