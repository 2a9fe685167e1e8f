"""Two ranks with unequal shares of features and of digits; each writes the moments of all."""

from pathlib import Path

import torch.distributed as dist

from noisewise.metrics.digits_features import load_digits_classifier
from noisewise.metrics.frechet import Moments
from noisewise.metrics.reference import Key, reference
from tests.metrics.sets import digits, gaussian
from tests.workers.contracts import finish


def listed(moments):
    return {"count": moments.count, "mean": moments.mean.tolist(), "cov": moments.cov.tolist()}


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    rows = gaussian(100, 6)
    moments = Moments(6)
    moments.update(rows[:70] if first else rows[70:])
    alone = Moments(6)
    if first:
        alone.update(rows)

    network, name = load_digits_classifier()
    images = digits()[:120]
    key = Key("digits", name, "digits")
    share = [images[:80]] if first else [images[80:]]
    made = reference(share, key, network, folder=out, keep_features=True)
    alone_made = reference([images] if first else [], Key("one rank", name, "digits"), network, folder=out, keep_features=True)
    kept = reference(lambda: 1 / 0, key, network, folder=out)
    finish(
        out,
        {
            "features": listed(moments.synchronised()),
            "empty": listed(alone.synchronised()),
            "digits": listed(made.moments),
            "digits_empty": listed(alone_made.moments),
            "kept": listed(kept.moments),
            "rows": [made.features.tolist(), alone_made.features.tolist()],
        },
    )
