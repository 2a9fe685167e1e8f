"""Signals ask for an end; they do not end anything by themselves until they are asked twice."""

import os
import signal
import threading

import pytest

from noisewise.training.signals import ASKING, StopRequest


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
