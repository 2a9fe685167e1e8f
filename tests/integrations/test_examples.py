"""Each example runs as a new user would run it, says what it promises and fits on a screen."""

import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
pytestmark = pytest.mark.slow


@pytest.fixture
def run_here(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[str]]]:
    """An example as a program in this process, to save the imports: what it prints."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "")  # Lightning sets it: this takes it away in the end
    monkeypatch.delenv("PL_GLOBAL_SEED")
    threads = torch.get_num_threads()

    def run(name: str) -> list[str]:
        AcceleratorState._reset_state(True)
        with warnings.catch_warnings():
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.strip().splitlines()

    yield run
    AcceleratorState._reset_state(True)
    torch.set_num_threads(threads)


def run(name: str, *launcher: str) -> list[str]:
    """As a user runs it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert launcher or done.returncode == 0, done.stderr  # gloo may abort at exit, after all is said
    return done.stdout.strip().splitlines()


def numbers(line: str) -> list[float]:
    return [float(x) for x in re.findall(r"\d+\.\d+", line)]


def test_plain_loop_draws_more_where_the_loss_is_large() -> None:
    _, _, uniform_loss, drawn, loss, honest = run("plain_loop.py")
    assert numbers(drawn) == sorted(numbers(drawn), reverse=True)
    assert numbers(drawn)[0] > 1.5
    assert numbers(loss)[-1] < 1.05 * numbers(uniform_loss)[-1] < 0.5
    assert "toy" in honest


@pytest.mark.parametrize("name", ["class_conditional.py", "text_conditional.py"])
def test_conditional_models_use_the_condition(name: str, run_here: Callable[[str], list[str]]) -> None:
    _, *rows, honest = run_here(name)
    assert len(rows) == 6
    for drawn, right, wrong in (rows[:3], rows[3:]):
        assert all(bad > 5 * good for good, bad in zip(numbers(right), numbers(wrong), strict=True))
        assert sum(numbers(drawn)) == pytest.approx(3, abs=0.01)
    assert numbers(rows[0]) == [1, 1, 1]
    assert max(numbers(rows[3])) > 1.3
    assert "toy" in honest


def test_trajectories_draw_more_where_the_loss_is_large(run_here: Callable[[str], list[str]]) -> None:
    sigma, _, _, drawn, loss, honest = run_here("trajectories.py")
    assert numbers(sigma) == sorted(numbers(sigma))
    assert max(numbers(drawn)) == numbers(drawn)[-1] > 1.5
    assert max(numbers(loss)[:5]) == numbers(loss)[4]
    assert "toy" in honest


def check_accelerate(lines: list[str], processes: int) -> None:
    *epochs, resumed = lines
    steps = [128 // processes // 2 * epoch for epoch in (1, 2, 3, 4)]  # 128 batches, shared, two an optimizer step
    assert [int(line.split()[2]) for line in epochs] == steps
    assert numbers(epochs[-1])[0] > 1.5
    assert resumed == f"{processes} process(es); resumed after epoch 1 the density is the same bit for bit: True"


def test_accelerate_accumulates_and_resumes(run_here: Callable[[str], list[str]]) -> None:
    check_accelerate(run_here("accelerate_loop.py"), 1)


def test_accelerate_accumulates_and_resumes_in_two_processes() -> None:
    check_accelerate(run("accelerate_loop.py", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"), 2)


def test_lightning_accumulates_and_resumes(run_here: Callable[[str], list[str]]) -> None:
    lines = [line for line in run_here("lightning_module.py") if line.startswith(("epoch", "resumed"))]
    assert lines.pop(2) == "resumed from Lightning's own checkpoint"
    assert [int(line.split()[2]) for line in lines] == [64, 128, 192, 256]
    assert numbers(lines[-1])[0] > numbers(lines[0])[0] > 1.5


@pytest.mark.parametrize(
    "name", ["plain_loop", "class_conditional", "text_conditional", "trajectories", "accelerate_loop", "lightning_module"]
)
def test_an_example_fits_on_a_screen(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 90
