"""Tables and sentences hold the numbers, and say no more than the seeds allow."""

import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console
from scipy import stats

from noisewise.study.findings import explanation, findings
from noisewise.study.outcome import Failure, read_comparison
from noisewise.study.summary import Spread, summarise
from noisewise.study.table import print_table, spread_text, table_columns
from tests.study.made import compared, curve, planted, rewrite

LONG = "adaptive:estimator=lookahead,target=(minsnr),correction=none"


def curves(values, process="linear", first=(60, 50)):
    return {(process, name, seed): curve(*first, end) for name, ends in values.items() for seed, end in enumerate(ends)}


def rows(comparison):
    """By sampler, a dict from headings to cells."""
    summaries = summarise(comparison)
    columns = table_columns(summaries)
    return {one.sampler: {column.heading: column.cell(one) for column in columns} for one in summaries}


def printed(comparison, width, colour=False):
    file = io.StringIO()
    print_table(comparison, Console(file=file, width=width, force_terminal=True, no_color=True))
    said = file.getvalue()
    return said if colour else re.sub(r"\x1b\[[0-9;]*m", "", said)


EVERYTHING = compared(
    {
        **curves({"uniform": [45.12, 46.4], "minsnr": [45.3, 44.4], LONG: [35.25, 36.75]}),
        ("linear", "speed", 0): curve(20, 50, 47),
        ("linear", "p2", 0): curve(61, 60),
        ("linear", "p2", 1): curve(61, 60, 59)[:2],
        **curves({"uniform": [40.5, 41.25], "minsnr": [40.25, 40.75]}, "cosine"),
    },
    metric="digits-frechet",
    failures={("linear", "speed", 1): Failure("out of [memory]", 300)},
)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((2.33333,), "2.333"),
        ((0.0390123,), "0.03901"),
        ((12345.6,), "12346"),
        ((20,), "20"),
        ((1.0, 2.0, 4.0), "2.333 ± 1.5"),  # half the range
        ((1.5, math.nan), "nan"),
    ],
)
def test_numbers_have_four_digits_and_whole_ones_stay_whole(values, text):
    assert spread_text(Spread(values)) == text


def test_rows_hold_the_numbers_and_the_baseline_comes_first():
    found = rows(compared(curves({"adaptive": [10, 15], "uniform": [20, 20]})))
    assert list(found) == ["uniform", "adaptive"]
    assert found["uniform"] == {
        "sampler": "uniform",
        "seeds": "2",
        "steps": "1000",
        "it/s": "100",
        "held-out loss": "0.2 ± 0",
        "FID": "20 ± 0",
        "over uniform": "1.000",
        "steps to uniform's final": "1000 (1.00×)",
        "seconds to uniform's final": "10.0 (1.00×)",
        "area": "45.01 ± 0",
        "p": "",
        "verdict": "baseline",
    }
    adaptive = found["adaptive"]
    assert (adaptive["FID"], adaptive["over uniform"]) == ("12.5 ± 2.5", "0.612")
    assert adaptive["steps to uniform's final"] == "935 (1.07×)"  # 667 + 333 times 30/40 and 30/35
    assert adaptive["verdict"] == "lower in 2 of 2 seeds"
    assert adaptive["p"] == f"{stats.ttest_1samp([math.log(0.5), math.log(0.75)], 0).pvalue:.3f}"


def test_what_was_not_reached_is_said_so():
    values = {"uniform": [20, 20], "minsnr": [20.5, 21], "adaptive": [20.5, 19], "speed": [20, 20]}
    made = curves(values)
    made |= {("linear", "p2", seed): curve(15, 50, 30) for seed in range(2)}
    made = compared(made)
    found = {name: row["steps to uniform's final"] for name, row in rows(made).items()}
    assert found["minsnr"] == "not reached"
    assert found["adaptive"] == "reached in 1 of 2 seeds"
    assert found["speed"] == "1000 (1.00×)"
    assert found["p2"] == "≤ 333 (≥ 3.00×)"
    assert any("final value after at most 33 % of its steps and 33 % of its seconds" in said for said in findings(made))


INCOMPLETE = {
    **curves({"uniform": [20, 20]}),
    ("linear", "speed", 0): curve(20, 50, 47),
    ("linear", "p2", 0): curve(61, 60),
    ("linear", "p2", 1): curve(61, 60, 59)[:2],
}
FAILURES = {("linear", "speed", 1): "diverged", ("linear", "minsnr", 0): "diverged"}


def test_seeds_that_were_lost_are_counted_and_without_any_cells_are_empty():
    found = rows(compared(INCOMPLETE, failures=FAILURES))
    row = {heading: value for heading, value in found["minsnr"].items() if heading not in ("sampler", "seeds")}
    assert (row.pop("verdict"), set(row.values())) == ("no finished run", {""})
    assert {name: row["seeds"] for name, row in found.items()} == {
        "uniform": "2",
        "speed": "1 of 2, 1 failed",
        "p2": "1 of 2, 1 unfinished",
        "minsnr": "0 of 1, 1 failed",
    }


def test_without_a_distance_there_is_no_column_for_it():
    found = rows(compared(curves({"uniform": [0.4], "adaptive": [0.3]}), metric=None))["adaptive"]
    assert "FID" not in found
    assert (found["held-out loss"], found["over uniform"]) == ("0.3", "0.750")


def test_a_headline_has_a_column_of_its_own_and_judges_nothing():
    planted = curves({"uniform": [20, 24], "adaptive": [10, 12]})
    plain, made = compared(planted), compared(planted, headline=50_000)
    found = rows(made)["adaptive"]
    assert found.pop("FID of 50,000") == "5.5 ± 0.5"
    assert found == rows(plain)["adaptive"]
    assert "FID of 50,000 is of that many images" in explanation(made)
    assert "images" not in explanation(plain)


def test_a_baseline_with_a_long_name_is_called_baseline_in_headings():
    made = compared(curves({LONG: [20], "uniform": [10]}), baseline=LONG)
    assert "over baseline" in rows(made)["uniform"]
    assert '"Over baseline"' in explanation(made)


# What is bold ---------------------------------------------------------------------------------------------------------


def bold(made):
    lines = printed(made, 160, colour=True).splitlines()
    return [match[1] for line in lines if (match := re.match(r"\x1b\[1m(uniform|minsnr|adaptive)", line))]


def test_bold_is_what_was_shown_to_be_better_and_nothing_else():
    assert bold(compared(curves({"uniform": [20, 21, 22], "minsnr": [31, 32, 33], "adaptive": [10, 10.5, 11.1]}))) == [
        "adaptive"
    ]
    assert bold(compared(curves({"uniform": [20, 20], "minsnr": [10, 10], "adaptive": [11, 12]}))) == []  # two seeds
    assert bold(compared(curves({"uniform": [20, 20, 20], "adaptive": [10, 10, 28]}))) == []


def test_differences_of_next_to_nothing_are_ties_however_well_the_seeds_agree():
    made = compared(curves({"uniform": [264.168, 270.002, 259.5], "adaptive": [264.166, 270.0, 259.498]}))
    (one,) = [each for each in summarise(made) if not each.baseline]
    assert one.p_adjusted < 0.05
    assert one.verdict == "same"
    assert bold(made) == []


# Printed --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160, 250])
def test_whatever_the_width_no_number_is_cut_and_no_line_too_long(width):
    said = printed(EVERYTHING, width)
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= width
    words = set(tight(said).split())
    missing = left_out(said)
    for process in ("linear", "cosine"):
        summaries = [one for one in summarise(EVERYTHING) if one.process == process]
        for column in table_columns(summaries):
            if column.heading in (*missing, "sampler"):
                continue
            for one in summaries:
                assert set(tight(column.cell(one)).split()) <= words, column.heading
    for name in ("uniform", "minsnr", "speed", "p2"):
        assert name in words


def left_out(said):
    """The headings of all columns for which there was no room."""
    return [
        name for names in re.findall(r"No room for: (.*?)\. A wider", re.sub(r"\s+", " ", said)) for name in names.split(", ")
    ]


def tight(text):
    """Signs with their numbers, as they are in narrow columns."""
    return re.sub("([±≤≥]) ", r"\1", text)


def test_a_hundred_columns_show_what_matters():
    assert set(left_out(printed(EVERYTHING, 100))) == {"area", "it/s", "steps"}
    assert left_out(printed(EVERYTHING, 160)) == []


@pytest.mark.parametrize(("budget", "goes"), [("1000it", "seconds to uniform's final"), ("10s", "steps to uniform's final")])
def test_of_the_two_times_that_of_the_budget_stays_longer(budget, goes):
    made = compared(curves({"uniform": [20.25, 20], "adaptive": [10.75, 15]}), budget=budget)
    assert [name for name in left_out(printed(made, 70)) if "final" in name] == [goes]


def test_long_names_go_on_in_the_next_line():
    said = printed(EVERYTHING, 100)
    start = said.index("adaptive:")
    lines = [line[:12].strip() for line in said[start:].splitlines()]
    broken = lines[: next(n for n in range(1, 9) if "".join(lines[:n]) == LONG)]
    assert all(line[-1] in ":,+=(" for line in broken[:-1])  # never inside a word


def test_the_terminal_also_gets_findings_and_explanation(capsys):
    """Without a terminal the text is as wide as in a wide one."""
    print_table(EVERYTHING)
    said = capsys.readouterr().out
    flat = re.sub(r"\s+", " ", said)
    assert "\x1b" not in said
    assert explanation(EVERYTHING) in flat
    for sentence in findings(EVERYTHING):
        assert sentence in flat
    assert max(map(len, said.splitlines())) > 100
    assert "No room" not in said


# In words -------------------------------------------------------------------------------------------------------------


def test_findings_say_how_large_how_sure_and_how_soon():
    assert findings(compared(curves({"uniform": [20, 20], "adaptive": [10, 15]}))) == [
        "adaptive: 0.61 times uniform's FID (lower in 2 of 2 seeds, p = 0.250: too few seeds to call it better); "
        "uniform's final value after 93 % of its steps and 93 % of its seconds"
    ]


@pytest.mark.parametrize(
    ("mine", "theirs", "says"),
    [
        ([10], [20], "0.50 times uniform's FID (one seed: too few to judge)"),
        ([30, 40], [20, 20], "too few seeds to call it worse); uniform's final value not reached"),
        ([10, 30], [20, 20], "lower in 1 of 2 seeds, p = 0.837: no clear difference); uniform's final value reached in 1 of 2"),
        ([20, 20], [20, 20], "1.00 times uniform's FID (the same in 2 seeds)"),
        ([10, 10.5, 9.5], [20, 20, 20], "0.50 times uniform's FID (better: p = 0.002 over 3 seeds only)"),
        ([10, 10.5, 9.5, 10, 10.2], [20] * 5, "0.50 times uniform's FID (better: p < 0.001 over 5 seeds)"),
        ([40, 41, 42, 40, 39], [20] * 5, "(worse: p < 0.001 over 5 seeds)"),
        ([19.9, 15, 19.8, 19.9, 19.9], [20] * 5, "lower in 5 of 5 seeds, p = 0.329: no clear difference"),
        ([-0.1, 0.3], [0.2, 0.5], "FID 0.1 against 0.35 (lower in 2 of 2 seeds"),
        ([float("nan"), 10], [20, 20], "adaptive: no finite FID in 1 of 2 seeds"),
        ([10, 10], [], "adaptive: no baseline to compare with"),
    ],
)
def test_findings_say_no_more_than_the_seeds_allow(mine, theirs, says):
    said = findings(compared(curves({"uniform": theirs, "adaptive": mine})))
    assert len(said) == 1
    assert says in said[0]


@pytest.mark.parametrize(
    ("ends", "error", "warned"),
    [((18, 19), 0.1, False), ((18, 19), 3.0, True), ((18, 19), None, False), ((10, 19), 1.0, False)],
)
def test_too_few_images_to_tell_two_samplers_apart_are_warned_of(ends, error, warned):
    made = compared(curves({"uniform": [20, 20], "adaptive": ends}), images=5000)
    outcomes = [replace(run, evaluations=[replace(one, error=error) for one in run.evaluations]) for run in made.outcomes]
    said = [one for one in findings(replace(made, outcomes=outcomes)) if "5,000 images cannot tell it from uniform" in one]
    assert len(said) == warned
    if warned:
        assert "differs by 2 at most" in said[0]
        assert "are 8.49" in said[0]  # 2 sqrt(3^2 + 3^2)


def test_findings_say_why_a_sampler_with_failed_runs_is_not_called_better():
    made = compared(
        curves({"uniform": [20] * 4, "adaptive": [10, 10.5, 9.5]}),
        failures={("linear", "adaptive", 3): "the loss is not finite"},
    )
    assert "(lower in 3 of 3 seeds, p = 0.002: not called better, since 1 of its runs failed)" in findings(made)[0]
    assert "with failed runs is never called" in explanation(made)


def test_the_schedule_is_named_where_there_are_several():
    said = findings(EVERYTHING)
    assert any(sentence.startswith("minsnr on cosine: ") for sentence in said)
    assert any(sentence.startswith("minsnr on linear: ") for sentence in said)
    assert list(rows(EVERYTHING)["uniform"])[:2] == ["schedule", "sampler"]
    assert not any(" on linear" in sentence for sentence in findings(compared(curves({"uniform": [2], "minsnr": [1]}))))


def test_lost_runs_are_named_with_their_reason():
    said = findings(EVERYTHING)
    assert "speed on linear, seed 1: failed at step 300: out of [memory]" in said
    assert "p2 on linear, seed 1: not finished" in said
    never = findings(compared(curves({"uniform": [20]}), failures={("linear", "speed", 0): "no such setting"}))
    assert never == ["speed: no finished run", "speed, seed 0: failed: no such setting"]


def test_a_baseline_that_was_better_before_its_end_is_a_warning():
    made = compared({("linear", "uniform", 0): curve(80, 60, 40, 50), ("linear", "adaptive", 0): curve(80, 60, 40, 30)})
    said = findings(made)
    assert said[0].startswith("uniform: its own final value after 62 % of its steps and 62 % of its seconds: its curve rises")
    assert len(said) == 2


def test_a_baseline_alone_is_compared_with_nothing():
    assert findings(compared(curves({"uniform": [20, 20]}))) == ["uniform alone: nothing to compare with"]
    assert findings(compared({})) == ["no run has begun yet"]
    assert "uniform alone" in printed(compared(curves({"uniform": [20, 20]})), 100)


def test_the_explanation_names_metric_baseline_and_the_weakness_of_few_seeds():
    few = explanation(compared(curves({"uniform": [20, 20], "adaptive": [10, 12]})))
    assert "judged by FID" in few
    assert "half the range over seeds" in few
    assert "paired t-test" in few
    assert "With 2 seeds any p is weak" in few
    assert "judged by held-out loss" in explanation(compared(curves({"uniform": [0.2], "adaptive": [0.3]}), metric=None))
    many = explanation(compared(curves({"uniform": [20] * 5, "adaptive": [10, 11, 12, 13, 14]})))
    assert "weak" not in many
    one = explanation(compared(curves({"uniform": [20], "adaptive": [10]})))
    assert "One seed is too few" in one
    assert "weak" not in one


def late_sentences(folder, sampler):
    """What is said of samplers that have not begun to learn, where one's draws stay uniform up to step 1,000."""
    late = "had not begun to learn, its draws were still uniform after 1,000 steps"
    made = planted(folder, curves({"uniform": [20], sampler: [10]}))
    assert not any(late in sentence for sentence in findings(made)), "the planted densities are not flat"
    run = next(one.folder for one in made.outcomes if one.sampler == sampler)
    rewrite(run, lambda row: {**row, "density_by_level": [1.0] * 50} if "density_by_level" in row else row)
    return [sentence for sentence in findings(read_comparison(folder)) if late in sentence]


@pytest.mark.parametrize(("sampler", "learning"), [("adaptive", True), ("mix:of=(loss_moment)", True), ("minsnr", False)])
def test_a_sampler_that_has_not_begun_to_learn_is_named(tmp_path, sampler, learning):
    """Weights alone draw uniformly too, and nothing is to be said of them."""
    said = late_sentences(tmp_path, sampler)
    assert [sentence.startswith(f"{sampler}: ") for sentence in said] == [True] * learning


@pytest.mark.parametrize(
    ("sampler", "why"),
    [
        ("adaptive:warmup=1500", ", or a shorter warmup (now 1,500),"),
        ("adaptive:warmup=0,every=2000", ", or a smaller every (now 2,000),"),
        ("adaptive:warmup=900,every=800", ", or a smaller every (now 800),"),
        ("mix:of=(adaptive:warmup=1500,every=2000)", ", or a shorter warmup (now 1,500) and a smaller every (now 2,000),"),
        ("adaptive:estimator=lookahead,warmup=1500", ", or a shorter warmup (now 1,500),"),
        ("paper_cifar10:every=2000", ", or a smaller every (now 2,000),"),
        ("gradient_variance:every=100", ", or a smaller every (now 100),"),
        ("loss_moment", ""),
    ],
)
def test_what_kept_it_from_learning_is_named(tmp_path, sampler, why):
    (said,) = late_sentences(tmp_path, sampler)
    assert said.endswith(f"1,000 steps; a longer budget{why} would show what learning does")
