"""Freed memory is kept for the next step, where the C library can."""

import os
import platform
import subprocess
import sys

CODE = """
import resource, sys, torch
from noisewise.training.trainer import keep_freed_memory
asked = keep_freed_memory() if "ask" in sys.argv else None
def touch():  # 16 MiB in blocks that glibc's heap holds, freed again
    blocks = [torch.ones(2**16) for _ in range(64)]
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    touch()
print(asked, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*arguments: str, **variables: str) -> tuple[str, int]:
    environment = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=True, env=environment)
    asked, count = done.stdout.split()
    return asked, int(count)


def test_memory_that_is_kept_is_not_asked_for_again():
    asked, kept = faults("ask")
    if platform.libc_ver()[0] != "glibc":
        assert asked == "False"
        return
    assert asked == "True"
    # glibc moves its thresholds by what it has seen, so that what an unasked process does depends on its start: pin them
    _, unasked = faults(MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072")
    assert kept < unasked / 10
