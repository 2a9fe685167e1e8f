"""One thread a process: workers do not fight over cores, and runs made here and elsewhere can be compared bit for bit.

What is remembered between runs goes into a folder of its own, not into the user's.
"""

import atexit
import gc
import os
import shutil
import tempfile

import pytest
from hypothesis import settings

settings.register_profile("fixed", derandomize=True)  # the same examples every time, everywhere
settings.load_profile("fixed")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported, which is later

if "NOISEWISE_TEST_STATE" not in os.environ:  # workers of pytest-xdist inherit it
    os.environ["NOISEWISE_TEST_STATE"] = os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="noisewise-state-")
    atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)


@pytest.fixture(scope="module")
def little_garbage():
    """For tests that collect garbage: what was there before is no longer looked at, which is a hundred times faster."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
