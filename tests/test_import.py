"""Importing the core loads torch and numpy, and none of the packages that only extras bring."""

import json
import subprocess
import sys

OPTIONAL = [
    "accelerate",
    "diffusers",
    "lightning",
    "matplotlib",
    "PIL",
    "pytorch_lightning",
    "rich",
    "safetensors",
    "scipy",
    "sklearn",
]


def test_the_core_needs_no_extra():
    code = "import json, sys, noisewise; print(json.dumps(sorted(name.partition('.')[0] for name in sys.modules)))"
    loaded = set(json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout))
    assert {"torch", "numpy", "noisewise"} <= loaded
    assert loaded.isdisjoint(OPTIONAL)
