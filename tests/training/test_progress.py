"""What the user sees: bars, clocks, shares, and that nothing in a row of metrics can break the display."""

import io

import pytest
from rich.console import Console

from noisewise.training.config import Config
from noisewise.training.display import Progress, Shown, share_and_time_left, summary

NAN, INF = float("nan"), float("inf")
ROW = {
    "step": 50,
    "loss": 0.12345,
    "loss_by_level": [0.0, 0.5, None, 1.0],
    "density_by_level": [1.0, 1.0, 2.0, 0.0],
    "steps_per_second": 12.34,
    "skipped": 0,
}


# Time left


def of(steps=100, seconds=None):
    return Config(steps=steps, seconds=seconds)


@pytest.mark.parametrize(
    ("config", "start", "now", "share", "left"),
    [
        # a budget of steps: before it begins, after the first step, on the way, at the end
        (of(100), (0, -1.0), (0, 0.0), 0.0, None),
        (of(100), (1, 5.0), (1, 5.0), 0.01, None),
        (of(100), (1, 5.0), (21, 15.0), 0.21, 79 * 0.5),
        (of(100), (1, 5.0), (100, 54.5), 1.0, 0.0),
        # a budget of seconds that comes first
        (of(10**6, 60.0), (1, 5.0), (1, 15.0), 0.25, 45.0),
        (of(10**6, 60.0), (1, 5.0), (21, 15.0), 0.25, 45.0),
        (of(10**6, 60.0), (1, 5.0), (200, 61.0), 1.0, 0.0),
        # both, and the steps come first
        (of(100, 1000.0), (1, 5.0), (21, 15.0), 0.21, 79 * 0.5),
        # both, and the seconds come first
        (of(100, 30.0), (1, 5.0), (21, 15.0), 0.5, 15.0),
        # resumed at step 50 after 1000 seconds on a slower machine: the speed is that of this process
        (of(100), (50, 1000.0), (60, 1001.0), 0.6, 4.0),
        (of(100), (50, 1000.0), (50, 1000.0), 0.5, None),
        # resumed with fewer steps than were made
        (of(100), (150, 10.0), (150, 10.0), 1.0, None),
    ],
)
def test_share_and_time_left(config, start, now, share, left):
    found_share, found_left = share_and_time_left(config, start, now)
    assert found_share == pytest.approx(share)
    assert found_left == (None if left is None else pytest.approx(left))


# Rows


def test_a_row_in_one_line():
    assert summary(ROW) == "loss 0.1235  by noise level ▁▅·█  drawn ▅▅█▁  12.3 it/s"
    assert summary({**ROW, "skipped": 3, "steps_per_second": None}).endswith("drawn ▅▅█▁  3 skipped")


def test_a_row_of_numbers_that_are_not_finite_is_shown():
    text = summary({**ROW, "loss": NAN, "loss_by_level": [NAN, INF, 1.0], "skipped": 1})
    assert text.startswith("loss nan  by noise level ··█")


# Lines


def test_lines_are_printed_and_messages_go_to_the_other_stream(capsys):
    lines = Shown(pause=0.0)
    with lines.running(Config(steps=200), 0):
        lines.step(1, 0.1)
        lines.row(ROW)
        lines.row({**ROW, "step": 100})
        lines.tell("careful")
    said = capsys.readouterr()
    assert said.out == f"step 50/200  {summary(ROW)}\nstep 100/200  {summary(ROW)}\n"
    assert said.err == "careful\n"


def test_lines_are_few_but_the_first_and_the_last_are_shown(capsys):
    lines = Shown(pause=3600.0)
    with lines.running(Config(steps=200), 0):
        for step in range(10, 201, 10):
            lines.row({**ROW, "step": step})
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["10/200", "200/200"]


def test_quiet_says_nothing(capsys):
    quiet = Progress()
    with quiet.running(Config(), 0):
        quiet.step(1, 0.1)
        quiet.row(ROW)
        quiet.tell("nothing")
    assert capsys.readouterr() == ("", "")


# The bar


def drawn(act, config=None, step=0, width=160):
    """What a terminal of this width is sent."""
    file = io.StringIO()
    bar = Shown(Console(file=file, force_terminal=True, width=width, color_system=None, legacy_windows=False))
    with bar.running(config or Config(steps=200, sampler="adaptive+minsnr"), step):
        act(bar)
    return file.getvalue()


def test_the_bar_shows_everything():
    def act(bar):
        bar.step(1, 1.0)
        bar.step(101, 51.0)
        bar.row(ROW)

    text = drawn(act)
    assert "adaptive+minsnr" in text
    assert "step 101/200" in text
    assert "0:51 spent, 0:50 left" in text
    assert summary(ROW) in text
    assert "━" in text


def test_the_bar_of_a_run_that_has_not_begun():
    text = drawn(lambda bar: None, step=7)
    assert "step 7/200" in text
    assert "left" not in text
    assert "first log point to come" in text


def test_the_bar_of_a_resumed_run_knows_the_speed_of_this_process():
    def act(bar):
        bar.step(101, 1000.0)
        bar.step(111, 1001.0)

    assert "16:41 spent, 0:09 left" in drawn(act, step=100)


@pytest.mark.parametrize("message", ["careful", "[red]not a colour", "runs/[/x]/a", "options: [a, b]", "100%"])
def test_messages_are_shown_as_they_are(message):
    assert message in drawn(lambda bar: bar.tell(message))


def test_a_name_with_brackets_is_shown_as_it_is():
    assert "a.b:x=[/x]" in drawn(lambda bar: None, Config(sampler="a.b:x=[/x]"))


def test_a_bar_can_be_used_again_after_a_failure():
    file = io.StringIO()
    bar = Shown(Console(file=file, force_terminal=True, width=160, color_system=None))
    with pytest.raises(KeyError), bar.running(Config(steps=10), 0):
        raise KeyError
    with bar.running(Config(steps=33), 3):
        bar.step(4, 1.0)
    assert "step 4/33" in file.getvalue()


def test_a_log_file_gets_lines_and_a_terminal_a_bar(capsys, monkeypatch):
    for terminal in (False, True):
        monkeypatch.setenv("FORCE_COLOR", "1" if terminal else "")  # rich takes it for a terminal
        shown = Shown(pause=0.0)
        with shown.running(Config(steps=200), 0):
            shown.row(ROW)
        said = capsys.readouterr()
        assert bool(said.out) != terminal
        assert ("step 0/200" in said.err) == terminal
