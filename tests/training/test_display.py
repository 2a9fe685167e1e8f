"""What all progress is shown with: clocks, sparklines, time left, counts and runs in terminals and log files."""

import io

import pytest
from rich.console import Console

from noisewise.training.config import Config
from noisewise.training.display import (
    Count,
    Display,
    Pace,
    Progress,
    Shown,
    clock,
    coarser,
    line,
    share_and_time_left,
    sparkline,
    summary,
)

NAN, INF = float("nan"), float("inf")
ROW = {
    "step": 50,
    "loss": 0.12345,
    "loss_by_level": [0.0, 0.5, None, 1.0],
    "density_by_level": [1.0, 1.0, 2.0, 0.0],
    "steps_per_second": 12.34,
    "skipped": 0,
}


def console(terminal=False):
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None, legacy_windows=False)


@pytest.mark.parametrize(
    ("values", "limits", "expected"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], {}, "▁▂▃▄▅▆▇█"),
        ([7.0, 0.0], {}, "█▁"),
        ([], {}, ""),
        ([None, None], {}, "··"),
        ([1.0, None, 2.0], {}, "▁·█"),
        ([3.0, 3.0], {}, "▁▁"),
        ([3.0, 3.0], {"low": 0.0}, "██"),
        ([0.0, 0.0], {"low": 0.0}, "▁▁"),
        ([0.5], {"low": 0.0, "high": 1.0}, "▅"),
        ([-5.0, 5.0], {"low": 0.0, "high": 1.0}, "▁█"),
        ([NAN, 0.0, 7.0], {}, "·▁█"),
        ([0.0, INF, 7.0, -INF], {}, "▁·█·"),
        ([NAN], {"low": 0.0}, "·"),
    ],
)
def test_sparklines(values, limits, expected):
    assert sparkline(values, **limits) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0:00"), (9.4, "0:09"), (59.6, "1:00"), (61, "1:01"), (3599.4, "59:59"), (3599.6, "1:00:00"), (90061, "25:01:01")],
)
def test_clocks(seconds, expected):
    assert clock(seconds) == expected


def test_neighbours_are_averaged():
    assert coarser([1.0, 3.0, 5.0, 7.0, 9.0], most=3) == [2.0, 6.0, 9.0]
    assert coarser([1.0, 2.0], most=10) == [1.0, 2.0]


# Time left


def test_the_pace_is_that_since_work_began_to_move():
    now = [0.0]
    pace = Pace(lambda: now[0])
    assert pace.time_left(0.2) is None  # done before
    now[0] = 100.0  # compiled until here
    assert pace.time_left(0.3) is None  # moves for the first time
    now[0] = 110.0
    assert pace.time_left(0.5) == pytest.approx(25.0)
    assert pace.time_left(0.5, to_do=0.2) == pytest.approx(10.0)
    assert pace.time_left(1.0) is None


def test_the_time_left_never_counts_up_and_is_not_said_where_it_was_far_off():
    now = [0.0]
    pace = Pace(lambda: now[0])
    said = []
    for moment, share in ((0, 0), (10, 0.1), (20, 0.2), (30, 0.3), (44, 0.4), (300, 0.5), (420, 0.9)):
        now[0] = float(moment)
        said.append(pace.time_left(share))
    assert said == [None, None, pytest.approx(80.0), pytest.approx(70.0), pytest.approx(68.0), None, pytest.approx(51.25)]


# Displays


def test_a_terminal_shows_the_view_and_a_log_file_what_is_said():
    for terminal in (True, False):
        display = Display(console(terminal))
        with display.shown(lambda: line("seen", 0.5)):
            display.say("[red]as it is[/]")
        said = display.console.file.getvalue()
        assert "[red]as it is[/]" in said
        assert ("seen" in said and "━" in said) == terminal


def test_cells_are_shown_as_they_are():
    shown = console()
    shown.print(line("a.b:x=[/x]", 0.25, "end"))
    assert shown.file.getvalue().split()[0] == "a.b:x=[/x]"


def test_each_tenth_is_said_once_and_in_log_files_alone():
    for terminal in (True, False):
        display = Display(console(terminal))
        for percent in (0, 5, 10, 11, 19, 40, 30, 100, 100):
            display.say_tenth(percent / 100, str(percent))
        assert display.console.file.getvalue().split() == ([] if terminal else ["0", "10", "40", "100"])


def test_other_processes_are_silent(monkeypatch, capsys):
    monkeypatch.setattr("noisewise.distributed.rank", lambda: 1)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Count("work", 10).shown() as count:
        count.add(5)
        print("printed")
    assert capsys.readouterr() == ("printed\n", "")


# Counts


@pytest.mark.parametrize("how", ["add", "reach"])
def test_a_count_in_a_log_file_is_a_line_at_each_tenth(how):
    count = Count("work", 40, console())
    with count.shown() as same:
        assert same is count
        for done in range(1, 41):
            count.add() if how == "add" else count.reach(done)
    assert count.display.console.file.getvalue().splitlines() == [f"work: {4 * tenth} of 40" for tenth in range(1, 11)]


def test_work_of_one_piece_or_none_has_no_lines():
    for total in (0, 5):
        count = Count("work", total, console())
        count.reach(total)
        assert count.display.console.file.getvalue() == ""


def test_a_count_in_a_terminal_is_a_bar():
    count = Count("work", 40, console(terminal=True))
    with count.shown():
        count.reach(30)
    said = count.display.console.file.getvalue()
    assert "30/40" in said
    assert "━" in said
    assert " of 40" not in said


# Time left of a run


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


# Rows of a run


def test_a_row_in_one_line():
    assert summary(ROW) == "loss 0.1235  by noise level ▁▅·█  drawn ▅▅█▁  12.3 it/s"
    assert summary({**ROW, "skipped": 3, "steps_per_second": None}).endswith("drawn ▅▅█▁  3 skipped")


def test_a_row_of_numbers_that_are_not_finite_is_shown():
    text = summary({**ROW, "loss": NAN, "loss_by_level": [NAN, INF, 1.0], "skipped": 1})
    assert text.startswith("loss nan  by noise level ··█")


# Lines of a run


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


# The bar of a run


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


def test_the_bar_leaves_out_a_time_that_was_far_off_instead_of_standing_still():
    def act(bar):
        for step, seconds in ((1, 1.0), (11, 2.0), (21, 62.0)):
            bar.step(step, seconds)
            texts.append("".join(part.plain for part in bar._drawn().renderables[0].columns[-1].cells))

    texts = []
    drawn(act)
    assert [text.partition(" spent")[2] for text in texts] == ["", ", 0:19 left", ""]


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
