"""Every rank generates and evaluates through the command line; each writes what the first one found, and how it ended."""

import json
import sys
from pathlib import Path

import torch

from noisewise import distributed
from noisewise.commands.cli import main as noisewise
from tests.workers.contracts import finish

FAST = ["--device", "cpu", "--solver", "ddim:steps=3"]


def evaluated(out: Path, run: str) -> dict:
    """What this rank has seen."""
    anyway = ["--device", "cpu", "--cache", str(out / "cache")]
    common = [*FAST, *anyway]
    everything = ["--metrics", "fid,kid,precision_recall,density_coverage,interval,sliced", "--heldout", "12", "--levels", "3"]
    status = {
        "generate": noisewise(["generate", run, *FAST, "--count", "23", "--batch", "5", "--out", str(out / "png")]),
        "npz": noisewise(["generate", run, *FAST, "--count", "23", "--batch", "5", "--out", str(out / "images.npz")]),
        "evaluate": noisewise(
            ["evaluate", run, *common, "--count", "60", "--batch", "7", *everything, "--json", str(out / "many.json")]
        ),
        # one chunk and one batch of features: the second rank has nothing to do, and must take part all the same
        "few": noisewise(
            ["evaluate", run, *common, "--count", "6", "--seed", "1", *everything, "--json", str(out / "few.json")]
        ),
        "folder": noisewise(["evaluate", str(out / "png"), *anyway, "--data", "digits", "--json", str(out / "folder.json")]),
    }
    distributed.barrier()  # the first rank writes the results
    found = {name: json.loads((out / f"{name}.json").read_text()) for name in ("many", "few", "folder")}
    return {"status": status, "world": distributed.world_size(), "found": found}


if __name__ == "__main__":
    torch.set_num_threads(1)
    finish(Path(sys.argv[1]), evaluated(Path(sys.argv[1]), sys.argv[2]))
