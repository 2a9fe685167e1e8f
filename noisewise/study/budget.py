"""How long each run of a study trains: "30s" of training steps, or "1000it"."""

import re
from dataclasses import replace

from noisewise.training.config import Config

ROWS = 20  # of metrics that a short run has at least


def with_budget(config: Config, budget: str) -> Config:
    """The configuration with "30s" or "1000it" as its end."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?=s)|\d+(?=it))(s|it)", budget)
    if not match or not float(match[1]) > 0:
        raise ValueError(f"--budget {budget!r}: give seconds as in 30s, or steps as in 1000it")
    if match[2] == "it":
        log = replace(config.log, every=min(config.log.every, max(1, int(match[1]) // ROWS)))
        return replace(config, steps=int(match[1]), epochs=None, seconds=None, log=log)
    return replace(config, steps=10**9, epochs=None, seconds=float(match[1]))
