"""Signals ask for an end; they do not end anything by themselves until they are asked twice."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from noisewise.training.signals import ASKING, StopRequest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_handlers():
    """Handlers that would be noticed, instead of those of pytest."""

    def handler(number, frame):
        raise AssertionError("this handler should have been replaced")

    before = {number: signal.signal(number, handler) for number in ASKING}
    yield handler
    for number, old in before.items():
        signal.signal(number, old)


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", ASKING)
def test_a_signal_sets_a_flag_and_the_work_goes_on(number):
    done = []
    with StopRequest() as stop:
        assert (stop.requested, stop.name) == (False, None)
        send(number)
        done.append("the work after it")
        assert (stop.requested, stop.name) == (True, number.name)
    assert done
    assert stop.requested  # and it can still be asked afterwards


def test_without_a_signal_nothing_is_requested():
    with StopRequest() as stop:
        pass
    assert not stop.requested


@pytest.mark.parametrize("fails", [False, True])
def test_the_handlers_from_before_are_back_afterwards(fails, own_handlers):
    try:
        with StopRequest():
            assert all(signal.getsignal(number) is not own_handlers for number in ASKING)
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert all(signal.getsignal(number) is own_handlers for number in ASKING)


@pytest.mark.parametrize("first", ASKING)
def test_a_second_interrupt_interrupts_at_once(first, own_handlers):
    with StopRequest() as stop:
        send(first)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL  # a third would kill, however long it takes to tidy up
    assert all(signal.getsignal(number) is own_handlers for number in ASKING)


def test_other_signals_may_come_often():
    with StopRequest() as stop:
        for _ in range(3):
            send(signal.SIGUSR1)
            send(signal.SIGTERM)
    assert stop.requested


def test_in_another_thread_signals_are_left_to_the_program(own_handlers):
    seen = []

    def work():
        with StopRequest() as stop:
            seen.append((stop.requested, [signal.getsignal(number) for number in ASKING]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, [own_handlers] * len(ASKING))]


def test_requests_can_be_nested():
    with StopRequest() as outer:
        with StopRequest() as inner:
            send(signal.SIGTERM)
        assert (outer.requested, inner.requested) == (False, True)
        send(signal.SIGUSR1)
        assert outer.name == "SIGUSR1"


def test_within_a_hurry_a_request_ends_the_block_at_once(own_handlers):
    with StopRequest() as stop:
        with pytest.raises(KeyboardInterrupt), stop.at_once():
            signal.raise_signal(signal.SIGTERM)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt), stop.at_once():  # asked before: it is not even begun
            pytest.fail("it was begun")


BUSY = """
import hashlib, sys, threading
from contextlib import nullcontext
from noisewise.training.signals import Acknowledged, StopRequest
sys.setswitchinterval(1000)  # so that the other thread speaks when the computation has begun, and not before
begun = threading.Event()
threading.Thread(target=lambda: begun.wait() and print("busy", flush=True), daemon=True).start()
with Acknowledged(), {request}:
    begun.set()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # one line of Python that takes many minutes
"""


@pytest.mark.parametrize(("request_", "said"), [("StopRequest()", "saving"), ("nullcontext()", "Ctrl-C: ending")])
def test_ctrl_c_is_answered_at_once_also_in_the_middle_of_a_long_computation(request_, said):
    command = [sys.executable, "-c", BUSY.format(request=request_)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout.readline() == "busy\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "\n"
        assert said in process.stderr.readline()
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
