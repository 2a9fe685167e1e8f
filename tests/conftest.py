"""One thread a process: workers do not fight over cores, and runs made here and elsewhere can be compared bit for bit."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported, which is later
