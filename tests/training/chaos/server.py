"""Imports everything once, then forks a process for each case: a run of the trainer with the shim armed.

Reads a JSON object a line: the words of the command, the folder to watch, and what is to happen there. Answers how it ended.
"""

import ctypes
import io
import json
import os
import signal
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout

import torch

import noisewise.commands.cli
import noisewise.commands.train
import noisewise.generation.run_samples
import noisewise.training.run

LIMIT = 120  # seconds, of what hangs


def child(case: dict) -> int:
    """What the forked process does."""
    said = os.open(case["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    arm = ctypes.CDLL(None).chaos_arm
    arm.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_int]
    if case["mode"]:
        arm(os.fsencode(case["below"]), os.fsencode(case["journal"]), ord(case["mode"]), case["at"], case["error"])
    try:
        status = noisewise.commands.cli.main(case["words"])
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    return int(status or 0)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        noisewise.commands.cli.main([*json.loads(sys.argv[1]), f"--out={place}/run"])  # imports the rest
    print("ready", flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        pid = os.fork()
        if not pid:
            status = 70
            try:
                status = child(case)
            finally:
                os._exit(status)
        end = time.monotonic() + LIMIT
        while not (found := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGABRT)
            time.sleep(0.002)
        print(json.dumps({"status": os.waitstatus_to_exitcode(found[1])}), flush=True)


if __name__ == "__main__":
    main()
