"""Lightning under its two names."""

import importlib

import pytest


@pytest.fixture(scope="module", params=["lightning.pytorch", "pytorch_lightning"])
def pl(request):
    return importlib.import_module(request.param)


@pytest.fixture(scope="module")
def lightning():
    return importlib.import_module("lightning.pytorch")
