"""Two ranks train under DDP through the front door and with `observe`; each writes digests of both runs."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.loops import Door, Observed
from tests.samplers.specs import LEARNERS, SPECS
from tests.workers.contracts import digest, finish

LEARNED = "adaptive:warmup=2,every=2+minsnr+learned"


def shared(run) -> str:
    """What must be the same on all ranks."""
    results = run.results()
    return digest(value for name, value in results.items() if not name.startswith("draw"))


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    result: dict = {"runs": {}}
    settings = {"rank": dist.get_rank(), "wrap": DistributedDataParallel}
    for spec in [*LEARNERS, *SPECS["curriculum"]]:
        for name, more in {"plain": {}, "accumulated": {"accumulate": 2}, "skipped": {"bad": {1, 4}}}.items():
            door, observed = (kind(spec, **settings, **more).run(6) for kind in (Door, Observed))
            result["runs"][f"{spec} {name}"] = {
                "door": digest(door.results().values()),
                "observed": digest(observed.results().values()),
                "shared": shared(door),
            }
    weighting = Door(LEARNED, **settings)
    before = digest(weighting.recipe.weighting.state_dict().values())
    weighting.run(6)
    after = digest(weighting.recipe.weighting.state_dict().values())
    result["learned"] = {"before": before, "after": after, "shared": shared(weighting)}
    finish(out, result)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
