"""Every rank validates: alike batches, a model with buffers under DDP, a sharded loader, and one rank that fails."""

from pathlib import Path

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from noisewise.looking.validation import validate
from tests.looking.test_validation import OBJECTIVE, batches, network
from tests.workers.contracts import finish


def failure(call) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), DistributedDataParallel(network())
    sizes = {"even": [4, 4, 4, 4], "odd": [5, 3, 4], "one": [7]}
    found = {}
    for name, each in sizes.items():
        for per_sample in (None, 3):
            result = validate(model, batches(each), OBJECTIVE, levels=6, per_sample=per_sample)
            found[f"{name}-{per_sample}"] = [result.loss.tolist(), result.error.tolist(), result.samples]
    for per_sample in (None, 1):
        result = validate(model, batches([5, 3, 4]), OBJECTIVE, levels="mlperf", per_sample=per_sample)
        found[f"mlperf-{per_sample}"] = [result.loss.tolist(), result.error.tolist(), result.samples]

    def only_the_second_fails(batch, u, noise):
        if rank:
            raise ZeroDivisionError("on purpose")
        return u

    errors = {
        "sharded": failure(lambda: validate(model, batches([4, 4, 4])[rank::2], OBJECTIVE)),
        "missing": failure(lambda: validate(model, batches([4])[rank:], OBJECTIVE)),
        "one fails": failure(lambda: validate(only_the_second_fails, batches([4, 4]), OBJECTIVE, levels=2)),
    }
    finish(out, {"found": found, "errors": errors, "training": model.training})
