"""The core loads torch and numpy, and none of the packages that only extras bring; its names are loaded when they are used."""

import json
import subprocess
import sys

import pytest

import noisewise

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


def loaded_by(code):
    code += "; import json, sys; print(json.dumps(sorted(name.partition('.')[0] for name in sys.modules)))"
    return set(json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout))


def test_the_core_needs_no_extra():
    loaded = loaded_by("from noisewise import *; recipe")
    assert {"torch", "numpy", "noisewise"} <= loaded
    assert loaded.isdisjoint(OPTIONAL)


def test_nothing_is_loaded_before_it_is_used():
    assert "torch" not in loaded_by("import noisewise; noisewise.__version__")


def test_public_names_and_modules_are_there_after_a_plain_import():
    code = "import noisewise; assert noisewise.recipes.recipe is noisewise.recipe; assert 'recipe' in dir(noisewise)"
    assert "torch" in loaded_by(code)
    assert all(getattr(noisewise, name) is not None for name in noisewise.__all__)
    with pytest.raises(AttributeError, match="module 'noisewise' has no attribute 'reciep'"):
        noisewise.reciep  # noqa: B018
