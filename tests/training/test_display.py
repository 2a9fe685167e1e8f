"""What all progress is shown with: clocks, sparklines, time left, and counts in terminals and log files."""

import io

import pytest
from rich.console import Console

from noisewise.training.display import Count, Display, Pace, clock, coarser, line, sparkline

NAN, INF = float("nan"), float("inf")


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
