"""Two ranks train a toy with every sampler, and with every estimator sharded by FSDP2; each writes digests of its draws and of
its sampler's state after every step.
"""

import hashlib
import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import noisewise
from noisewise import DDPM, Objective
from noisewise.distributed import whole
from tests.samplers.specs import ALL_SPECS
from tests.samplers.test_target import AIMED, WRAPPED, learner, trained_by_a_perfect_model
from tests.samplers.toy import Toy

SHARDED = [
    "adaptive:estimator=loss,warmup=0,every=2",
    "adaptive:estimator=reinforce,every=2,strata=10,queue=4",
    "adaptive:estimator=lookahead,strata=3,horizon=2,budget=1,probe=32,warmup=2",
    "gradient_variance:strata=3,every=2,rows=4",
]


def digest(tensors):
    every = hashlib.sha256()
    for tensor in tensors:
        every.update(tensor.detach().contiguous().numpy().tobytes())
    return every.hexdigest()


def train(spec, rank, batch, keep=None):
    toy = Toy(spec, DDPM.linear(), batch=batch, data_seed=rank, wrap=DistributedDataParallel)
    rows = []
    for _ in range(10):
        draw, _ = toy.step()
        rows.append({"draw": digest([draw.u]), "state": digest(toy.sampler.state_dict().values())})
    rows.append({"draw": "", "state": digest(toy.inner.state_dict().values())})
    if keep is not None:
        torch.save(toy.sampler.state_dict(), keep)
    return rows


def measured_gradients(larger):
    """The gradient variances with a model that nobody averages over ranks, where one rank's losses may be larger."""
    toy = Toy("gradient_variance:strata=2,every=1,rows=4", DDPM.linear(), batch=16)
    if dist.get_rank() == larger:
        losses = toy.objective.losses
        toy.objective = SimpleNamespace(process=toy.objective.process, losses=lambda *given: 10 * losses(*given))
        toy.recipe.weighting.weighted = lambda losses, *_: losses
    toy.run(4)
    return toy.sampler.variance.tolist()


def sharded(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, result = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    for spec in SHARDED:
        toy = Toy(spec, DDPM.linear(), batch=16, data_seed=rank, wrap=partial(fully_shard, mesh=mesh))
        states = []
        for _ in range(8):
            toy.step()
            states.append(digest(toy.sampler.state_dict().values()))
        parameters = [whole(parameter.detach()) for parameter in toy.model.parameters()]
        flat = bool(torch.equal(toy.sampler.table.mass, torch.full_like(toy.sampler.table.mass, 1 / toy.sampler.table.bins)))
        result[spec] = {"states": states, "parameters": digest(parameters), "uniform": flat}
    return result


def main(out: Path, table: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    result = {"equal": {}, "unequal": {}, "sharded": sharded(rank)}
    for number, spec in enumerate(ALL_SPECS):
        spec = spec.replace("{table}", table)
        result["equal"][spec] = train(spec, rank, 16, out / f"state{number}.pt" if rank == 0 else None)
        result["unequal"][spec] = train(spec, rank, 16 - 5 * rank)
    strata = noisewise.recipe("uniform", DDPM.linear(), draws="stratified").sampler
    result["stratified"] = [strata.sample(32).u.tolist() for _ in range(5)]
    result["gradients"] = [measured_gradients(larger) for larger in (None, 0, 1)]
    result["gamma"] = []
    for spec in (AIMED, WRAPPED["window"]):
        moved = learner(trained_by_a_perfect_model(spec, Objective(DDPM.linear()), 30, seed=rank))
        result["gamma"].append([float(moved.gamma), float(moved.power)])
    finish(out, result)


def finish(out: Path, result: dict) -> None:
    """Write this rank's result whole or not at all, and leave together."""
    part = out / f"part{dist.get_rank()}"
    part.write_text(json.dumps(result))
    os.replace(part, out / f"rank{dist.get_rank()}.json")
    dist.barrier()
    dist.destroy_process_group()
