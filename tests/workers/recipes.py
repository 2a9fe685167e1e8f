"""Two ranks train under DDP and FSDP2, through the front door and with `observe`; each writes digests of both runs."""

from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from noisewise.distributed import whole
from tests.loops import Door, Observed
from tests.samplers.specs import LEARNERS, SPECS
from tests.workers.contracts import SHARDED, digest, finish

LEARNED = "adaptive:warmup=2,every=2+minsnr+learned"


def shared(run) -> str:
    """What must be the same on all ranks."""
    results = run.results()
    return digest(whole(value) for name, value in results.items() if not name.startswith("draw"))


def compared(spec, **settings) -> dict[str, str]:
    """Digests of a run through the front door, of one with `observe`, and of what ranks share."""
    door, observed = (kind(spec, **settings).run(6) for kind in (Door, Observed))
    both = [digest(whole(value) for value in run.results().values()) for run in (door, observed)]
    return {"door": both[0], "observed": both[1], "shared": shared(door)}


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    result: dict = {"runs": {}}
    settings = {"rank": dist.get_rank(), "wrap": DistributedDataParallel}
    for spec in [*LEARNERS, *SPECS["curriculum"]]:
        for name, more in {"plain": {}, "accumulated": {"accumulate": 2}, "skipped": {"bad": {1, 4}}}.items():
            result["runs"][f"{spec} {name}"] = compared(spec, **settings, **more)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for spec in SHARDED:
        for accumulate in (1, 2):
            sharded = {"rank": dist.get_rank(), "wrap": partial(fully_shard, mesh=mesh), "accumulate": accumulate}
            result["runs"][f"{spec} sharded {accumulate}"] = compared(spec, **sharded)
    weighting = Door(LEARNED, **settings)
    before = digest(weighting.recipe.weighting.state_dict().values())
    weighting.run(6)
    after = digest(weighting.recipe.weighting.state_dict().values())
    result["learned"] = {"before": before, "after": after, "shared": shared(weighting)}
    finish(out, result)
