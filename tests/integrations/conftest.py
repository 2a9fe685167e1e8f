"""Lightning under its two names."""

import importlib

import pytest

from noisewise.integrations.lightning import PACKAGES


@pytest.fixture(scope="module", params=PACKAGES)
def pl(request):
    return importlib.import_module(request.param)


@pytest.fixture(scope="module")
def lightning():
    return importlib.import_module("lightning.pytorch")
