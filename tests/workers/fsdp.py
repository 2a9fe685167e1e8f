"""Two ranks train a toy sharded by FSDP2 with every estimator; each writes digests of its sampler's state."""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from noisewise import DDPM
from noisewise.distributed import whole
from tests.samplers.toy import Toy
from tests.workers.contracts import digest, finish

SPECS = [
    "adaptive:estimator=loss,warmup=0,every=2",
    "adaptive:estimator=reinforce,every=2,strata=10,queue=4",
    "adaptive:estimator=lookahead,strata=3,horizon=2,budget=1,probe=32,warmup=2",
    "gradient_variance:strata=3,every=2,rows=4",
]


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    result = {}
    for spec in SPECS:
        toy = Toy(spec, DDPM.linear(), batch=16, data_seed=rank, wrap=partial(fully_shard, mesh=mesh))
        states = []
        for _ in range(8):
            toy.step()
            states.append(digest(toy.sampler.state_dict().values()))
        parameters = [whole(parameter.detach()) for parameter in toy.model.parameters()]
        flat = bool(torch.equal(toy.sampler.table.mass, torch.full_like(toy.sampler.table.mass, 1 / toy.sampler.table.bins)))
        result[spec] = {"states": states, "parameters": digest(parameters), "uniform": flat}
    finish(out, result)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
