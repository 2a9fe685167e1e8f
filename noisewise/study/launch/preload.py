"""Imported by the server from which workers are forked, and by nothing else: what every run needs, which takes seconds.

A SIGTERM to the whole group of processes must not end the server, or nobody could say how its workers ended; the launcher,
which gets the signal too, tells everybody to save. The server ends by itself when its launcher does.
"""

import signal

import torch._dynamo
import torch.distributed.tensor  # noqa: F401

import noisewise.study.launch.local
import noisewise.study.worker  # noqa: F401

signal.signal(signal.SIGTERM, signal.SIG_IGN)
