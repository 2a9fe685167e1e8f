"""One thread a process, also without the Makefile: runs that are compared bit for bit are made here and in other processes."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when it is imported, which is later
