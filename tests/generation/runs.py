"""Tiny runs on the digits, trained once and copied by the tests that write into them."""

import atexit
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from noisewise.training.checkpoint import name_of
from noisewise.training.config import CheckpointConfig, ModelConfig
from noisewise.training.run import train
from tests.training.tiny import DIT, tiny


def settings(**changes):
    """Twelve steps with checkpoints at 6 and 12."""
    return tiny(checkpoint=CheckpointConfig(every=6, keep=5), **changes)


@cache
def trained_once(conditional=False, process="linear"):
    place = mkdtemp(prefix="noisewise-tests-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    folder = Path(place) / "run"
    model = ModelConfig(name="dit", options=DIT, conditional=conditional)
    return train(replace(settings(model=model), process=process, out=str(folder)))


def copy_of_run(to, **kind):
    """A run of one's own, named `run`, below a folder."""
    shutil.copytree(trained_once(**kind), to / "run")
    return to / "run"


def checkpoint_of(run, step):
    return run / "checkpoints" / name_of(step)


def damage(run, step, part="ema"):
    """Flip a bit in the middle of a checkpoint."""
    file = checkpoint_of(run, step) / f"{part}.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
