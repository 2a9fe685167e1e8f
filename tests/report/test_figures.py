"""What is drawn: the data of charts and heat maps, and their one drawing, in the page and in files for papers."""

import base64
import io
import json
import math
import re
import warnings
import zlib
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from noisewise.generation.images import grid
from noisewise.looking.palette import COLOURS, GREY, methods_named
from noisewise.metrics.optimal_loss import FILE, optimal_loss, save_optimal_loss
from noisewise.report import page, write_figures, write_report
from noisewise.report.charts import (
    Chart,
    HeatMap,
    Line,
    Panel,
    Point,
    doublings,
    heat_map,
    log_snr_of,
    log_snr_ticks,
    loss_charts,
    quality_charts,
    regular,
    scale_texts,
    thinned,
    training_charts,
)
from noisewise.report.figures import DENSITY, GRID, INK, SOFT, STYLE, all_figures, draw_chart, folded, panel_rows, tick_text
from noisewise.report.html import chart_svg, number, panel_svg
from noisewise.report.subject import Subject, read_subject
from noisewise.report.thumbnails import Picture, corner, encoded, read_pixels
from tests.study.made import SHAPE, compared, curve, planted, rewrite


def small(**settings):
    curves = {
        ("linear", sampler, seed): curve(*(scale * (1 + 0.5 * seed) * value for value in (8.0, 4.0)))
        for sampler, scale in (("uniform", 1.0), ("minsnr", 0.5))
        for seed in (0, 1)
    }
    return Subject(compared(curves, **settings))


def test_lines_are_means_over_seeds_and_remember_every_seed():
    steps, time = quality_charts(small(), "linear")
    assert [line.method.name for line in steps.lines] == ["uniform", "minsnr"]
    assert [(point.x, point.y, point.values, point.seeds) for point in steps.lines[1].points] == [
        (500, 5.0, (4.0, 6.0), (0, 1)),
        (1000, 2.5, (2.0, 3.0), (0, 1)),
    ]
    assert [point.x for point in time.lines[0].points] == [5.0, 10.0]
    assert (time.x, steps.y) == ("training time (s)", "FID (lower is better, log scale)")


def test_long_training_is_told_in_hours_and_a_seed_that_failed_does_not_bend_the_line():
    curves = {
        ("linear", "uniform", 0): curve(4.0, 2.0, seconds=7.2e4),
        ("linear", "uniform", 1): curve(90.0, 2.0, seconds=7.2e4)[:1],
    }
    time = quality_charts(Subject(compared(curves)), "linear")[1]
    assert time.x == "training time (h)"
    assert [(point.x, point.values) for point in time.lines[0].points] == [(10.0, (4.0,)), (20.0, (2.0,))]


def test_losses_by_level_are_drawn_plain_and_over_the_baseline_of_the_same_seed():
    plain, over = loss_charts(small(), "linear")
    first = plain.lines[0].points[0]
    assert first.x == 0.5 / len(SHAPE)
    assert first.values == pytest.approx([0.04 * SHAPE[0], 0.06 * SHAPE[0]])
    assert all(point.values == pytest.approx([0.5, 0.5]) for point in over.lines[1].points)
    assert over.level == 1
    assert (plain.log, over.log) == (True, False)


def test_what_is_left_to_learn_is_drawn_where_the_optimal_loss_is_known(tmp_path):
    curves = {("linear", sampler, 0): curve(8.0, 4.0) for sampler in ("uniform", "minsnr")} | {
        ("cosine", "uniform", 0): curve(8.0, 4.0)
    }
    comparison = planted(tmp_path / "made", curves)
    assert "reducible" not in [chart.name for chart in loss_charts(Subject(comparison), "linear")]
    optimal = optimal_loss(comparison.outcomes[0].config.objective(), torch.tensor([[-0.1], [0.1]]), draws=100)
    optimal = replace(optimal, collapse=torch.where(optimal.u < 0.5, 1.0, 0.01))
    save_optimal_loss(optimal, comparison.outcomes[1].folder / FILE)
    chart = loss_charts(Subject(comparison), "linear")[-1]
    assert (chart.name, chart.log, len(chart.lines)) == ("reducible", True, 2)
    u = [point.x for point in chart.lines[0].points]
    assert u == pytest.approx(np.linspace(0.525, 0.975, 10)), "levels that are memorised are left out"
    held_out = comparison.outcomes[0].evaluations[-1].held_out[-10:]
    expected = np.array(held_out) - optimal.at(torch.tensor(u)).numpy()
    assert [point.y for point in chart.lines[0].points] == pytest.approx(expected, rel=1e-6)
    other = loss_charts(Subject(comparison), "cosine")[-1]
    assert other.name == "reducible", "one file serves all schedules"
    assert "What is left to learn" in write_report(tmp_path / "made", tmp_path / "report.html").read_text()
    run = read_subject(comparison.outcomes[1].folder)
    by_level = training_charts(run)[-1]
    assert by_level.lines[-1].method.name == "optimal"
    assert min(point.x for point in by_level.lines[-1].points) > 0.5


def test_values_that_are_not_finite_are_not_drawn():
    curves = {("linear", "uniform", 0): curve(4.0, math.nan, 2.0)}
    assert [point.x for point in quality_charts(Subject(compared(curves)), "linear")[0].lines[0].points] == [333, 1000]


def test_rows_are_thinned_evenly_and_the_last_one_stays():
    assert thinned(list(range(1, 11)), 5) == [2, 4, 6, 8, 10]
    assert thinned([1, 2], 5) == [1, 2]


def of_values(*values, log=False):
    """A chart of one line, through these values."""
    points = tuple(Point(10.0 * (k + 1), (value,), (0,)) for k, value in enumerate(values))
    return Chart("name", "title", "step", "FID", (Line(methods_named(["uniform"])["uniform"], points),), log=log)


def drawn(chart):
    """The axes with the chart in them, and the numbers written at them from below."""
    with mpl.rc_context(STYLE):
        axes = Figure().subplots()
        draw_chart(axes, chart)
        axes.figure.draw_without_rendering()
    low, high = axes.get_ylim()
    return axes, [tick.get_text() for tick in axes.get_yticklabels() if low <= tick.get_position()[1] <= high]


@pytest.mark.parametrize(
    ("values", "log", "expected"),
    [
        ((0.05, 0.95), False, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ((0, 22000), False, ["0", "5,000", "10k", "15k", "20k"]),
        ((9, 60), True, ["10", "20", "50"]),
        ((3, 200), True, ["3", "10", "30", "100"]),
        ((1e-6, 1e3), True, ["10⁻⁶", "10⁻⁴", "0.01", "1", "100"]),
        ((0.9, 1.1), True, ["0.9", "0.95", "1", "1.05", "1.1"]),
    ],
)
def test_ticks_are_round_and_few(values, log, expected):
    assert drawn(of_values(*values, log=log))[1] == expected


def test_axes_leave_a_little_room_around_the_data():
    axes, _ = drawn(of_values(2.0, 12.0))
    assert axes.get_ylim() == pytest.approx((1.4, 12.6))
    assert axes.get_xlim() == pytest.approx((0, 20.6))
    low, high = drawn(of_values(3.0))[0].get_ylim()
    assert low < 3 < high


@pytest.mark.parametrize("log", [False, True])
def test_differences_of_next_to_nothing_are_not_blown_up(log):
    axes, ticks = drawn(of_values(0.99994, 1.00003, log=log))
    assert np.diff(axes.get_ylim()) > 0.003
    assert max(map(len, ticks)) <= 5


def test_numbers_are_written_to_be_read():
    written = [tick_text(value) for value in (0, 0.05, 5000, 20000, 2.5e6, 1e30, 1e-5, 2e-5, -4)]
    assert written == ["0", "0.05", "5,000", "20k", "2.5M", "10³⁰", "10⁻⁵", "2·10⁻⁵", "−4"]
    assert [number(value) for value in (1.23456, 123456.7, math.nan)] == ["1.235", "123,457", "not finite"]


def test_twelve_methods_all_look_different_and_the_baseline_is_grey():
    made = methods_named([f"method {i}" for i in range(12)])
    looks = [(method.colour, method.dash) for method in made.values()]
    assert len(set(looks)) == 12
    assert looks[0] == (GREY, ())
    assert [colour for colour, _ in looks[1:7]] == list(COLOURS)


def test_steps_of_a_heat_map_are_equal_and_hold_what_was_measured_in_them():
    rows = [{"step": step, "d": [float(step), 0.0]} for step in (10, 20, 30, 40)]
    assert regular(rows, "d", 2).tolist() == [[15.0, 0.0], [35.0, 0.0]]
    assert regular(rows, "d").tolist() == [row["d"] for row in rows]
    late = [{"step": step, "d": [float(step)]} for step in (70, 80, 90, 100)]
    assert regular(late, "d").tolist() == [[70.0], [70.0], [70.0], [90.0]]
    assert regular([{"step": 1}], "d") is None


def test_uniform_has_the_middle_colour_and_the_ends_are_cut_off():
    assert doublings(np.array([1.0, 2.0, 0.5, 9.0, 0.0]), 1).tolist() == [0, 1, -1, 1, -1]
    assert np.isnan(doublings(np.array([np.nan]), 1)).all()
    table = DENSITY(np.arange(255))[:, :3]
    assert [to_hex(table[i]) for i in (0, 127, 254)] == ["#0b3c5d", "#f1efe9", "#7a2a08"]
    light = table @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(light[:128]) > 0).all()
    assert (np.diff(light[127:]) < 0).all()
    assert scale_texts(2) == ["≤ ¼", "½", "1", "2", "≥ 4"]


def test_a_heat_map_has_a_pixel_for_each_number_and_brings_the_numbers_along():
    values = np.array([[1.0, np.nan], [2.0, 0.12345]])
    panel = Panel(methods_named(["uniform"])["uniform"], 0, 100, {"draws": values, "objective": np.ones((2, 2))})
    svg, data = panel_svg(panel, HeatMap("linear", (panel,), 1), "name")
    first, second = ElementTree.fromstring(svg).iter("image")
    assert (first.get("class"), second.get("class")) == ("draws", "objective")
    picture = Image.open(io.BytesIO(base64.b64decode(first.get("href").partition(",")[2])))
    seen = np.asarray(picture.convert("RGBA")).reshape(4, 4)
    assert float(first.get("transform").split()[3]) < 0  # turned over: the first step is at the bottom
    assert seen[1, 3] == 0  # nothing where there is no number
    assert [to_hex(colour / 255) for colour in seen[[0, 2, 3], :3]] == ["#f1efe9", "#7a2a08", "#0b3c5d"]
    told = {view: json.loads(zlib.decompress(base64.b64decode(packed))) for view, packed in data["views"].items()}
    assert told == {"draws": [[1.0, None], [2.0, 0.123]], "objective": [[1.0, 1.0], [1.0, 1.0]]}
    assert (data["end"], data["box"]["y"][:2], len(data["snr"])) == (100, [0, 100], 50)


@pytest.mark.parametrize("process", ["linear", "cosine", "vp", "ve", "edm", "flow"])
def test_log_snr_falls_along_the_noise_levels_and_its_ticks_can_be_read(process):
    assert (np.diff(log_snr_of(process)) < 0).all()
    values, places = zip(*log_snr_ticks(process), strict=True)
    assert len(values) >= 3
    assert (np.diff(values) < 0).all()
    assert (np.diff(places) >= 0.1).all()
    assert places[0] >= 0
    assert places[-1] <= 1


@pytest.mark.parametrize("process", ["cosine:max_beta=1", "linear:steps=10,beta_end=1", "linear:steps=1"])
def test_schedules_without_a_finite_log_snr_everywhere_are_drawn(tmp_path, process):
    """Zero terminal SNR ends at minus infinity; a single timestep has no range."""
    curve_of = log_snr_of(process, 10)
    assert (curve_of[-1] is None) == (process == "linear:steps=10,beta_end=1")
    assert all(np.isfinite(value) for value, _ in log_snr_ticks(process))
    planted(tmp_path, {(process, "uniform", 0): curve(2.0)})
    assert 'class="heat"' in write_report(tmp_path).read_text()
    assert write_figures(tmp_path, tmp_path / "figures", ["svg"])


def test_a_heat_map_takes_the_first_seed_that_has_rows(tmp_path):
    planted(tmp_path, {("linear", "minsnr", seed): curve(2.0) for seed in (3, 4)}, baseline="minsnr")
    subject = read_subject(tmp_path)
    (subject.comparison.outcomes[0].folder / "metrics.jsonl").write_text("")
    heat = heat_map(subject, "linear")
    assert [(panel.seed, panel.end) for panel in heat.panels] == [(4, 1000)]
    assert heat.panels[0].views["draws"].shape == (8, 50)


def test_enlarged_pictures_shrink_to_their_own_pixels_and_show_a_corner(tmp_path):
    samples = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    Image.fromarray(grid(samples, 8)).save(tmp_path / "a.png")
    found = read_pixels(tmp_path / "a.png")
    assert np.array_equal(found, grid(samples, 8, enlarge=1))
    assert np.array_equal(corner(found, 5), found[:46, :46])
    assert corner(found[:, :20], 5).shape == found[:, :20].shape


def test_pictures_get_rougher_and_then_fewer_until_they_fit(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (200, 200, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    method = methods_named(["uniform"])["uniform"]
    made = [Picture(method, "linear", seed, share, 1, tmp_path / "a.png") for seed in (0, 1) for share in (0.5, 1.0)]
    whole = encoded(made)
    assert len(whole) == 4
    size = sum(len(one.address) for one in whole)
    first = encoded(made, size - 1)
    assert {one.picture.seed for one in first} == {0}
    least = encoded(made, 45_000)
    assert [one.picture.share for one in least] == [1.0]
    assert len(least[0].address) <= 45_000


def test_a_chart_shows_its_data_in_the_colours_of_its_methods():
    chart = quality_charts(small(), "linear")[0]
    curves = {line.get_gid(): line for line in drawn(chart)[0].lines}
    for line in chart.lines:
        curve = curves[f"{chart.name}-method-{line.method.index}-line"]
        assert curve.get_xydata().tolist() == [[point.x, point.y] for point in line.points]
        assert to_hex(curve.get_color()) == line.method.colour


def test_numbers_under_the_pointer_lie_where_they_are_drawn():
    chart = quality_charts(small(), "linear")[0]
    assert chart.log
    text, data = chart_svg(chart, "name")
    svg = ElementTree.fromstring(text)
    assert [said["method"] for said in data["lines"]] == [0, 1]
    for line, said in zip(chart.lines, data["lines"], strict=True):
        assert [(point["x"], point["y"]) for point in said["points"]] == [(p.x, list(p.values)) for p in line.points]
        mine = svg.findall(f".//g[@data-method='{line.method.index}']")
        assert len(mine) == 2  # a band and a line
        marks = [(float(mark.get("x")), float(mark.get("y"))) for mark in mine[1].iter("use")]
        assert marks == [pytest.approx(place(data["box"], point.x, point.y), abs=0.02) for point in line.points]


def place(box, x, y):
    """As the script finds the place of a point on a chart whose y axis is logarithmic."""
    (low, high, left, right), (least, most, foot, top) = box["x"], box["y"]
    share = math.log(y / least) / math.log(most / least)
    return left + (x - low) / (high - low) * (right - left), foot + share * (top - foot)


def test_the_page_has_the_colours_of_the_figures_and_changes_those_that_differ_in_the_dark():
    style = (Path(page.__file__).parent / "style.css").read_text()
    light = style.partition("@media")[0]
    for name, colour in (("ink", INK), ("soft", SOFT), ("grid", GRID), ("baseline", GREY)):
        assert f"--{name}: {colour};" in light
    text, data = chart_svg(quality_charts(small(), "linear")[0], "name")
    assert set(re.findall("#[0-9a-f]{6}", text)) == {COLOURS[0]}
    assert set(re.findall(r"var\(([^)]*)\)", text)) == {"--ink", "--soft", "--grid", "--baseline"}
    assert [line["colour"] for line in data["lines"]] == ["var(--baseline)", COLOURS[0]]


def test_one_evaluation_alone_is_a_mark_with_its_range():
    method = methods_named(["uniform"])["uniform"]
    chart = Chart("name", "title", "step", "FID", (Line(method, (Point(10, (1.0, 2.0), (0, 1)),)),))
    (band,) = drawn(chart)[0].collections
    assert band.get_segments()[0].tolist() == [[10, 1], [10, 2]]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e308, -1e308, 5e-324, 1e99, 0.0, -1.0])
def test_runs_with_wild_numbers_are_reported(tmp_path, value):
    run = planted(tmp_path, {("linear", "uniform", 0): curve(2.0, value), ("linear", "minsnr", 0): curve(value)}).outcomes[0]
    wild = {"loss": value, "loss_by_level": [value] * 10, "density_by_level": [value] + [1.0] * 49}
    rewrite(run.folder, lambda row: row | wild if row["step"] > 800 else row)
    for target in (tmp_path, run.folder):
        assert 'class="chart"' in write_report(target).read_text()
        assert write_figures(target, tmp_path / "figures", ["svg"])


def test_names_are_drawn_as_they_are():
    """A dollar begins no formula, markup is text, and SVG takes letters that matplotlib's font lacks."""
    names = ("uniform", r"a$\nothing{$", "<b>&amp;", "ünïcödé 噪声")
    subject = Subject(compared({("linear", name, 0): curve(4.0, 2.0) for name in names}))
    panels = tuple(Panel(method, 0, 9, {"draws": np.ones((1, 1))}) for method in subject.methods)
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        for figure in [*all_figures(subject).values(), panel_rows(HeatMap("linear", panels, 1), "draws")]:
            file = io.BytesIO()
            figure.savefig(file, format="svg")
            words = list(ElementTree.fromstring(file.getvalue()).itertext())
            assert set(names) <= set(words)


def test_a_run_shows_its_loss_through_training_and_at_a_few_moments(tmp_path):
    run = planted(tmp_path, {("linear", "uniform", 0): curve(2.0)}).outcomes[0]
    through, levels = training_charts(read_subject(run.folder))
    assert [point.x for point in through.lines[0].points] == [125 * k for k in range(1, 9)]
    assert [line.method.name for line in levels.lines] == ["step 250", "step 500", "step 750", "step 1,000"]
    assert [len(line.points) for line in levels.lines] == [10] * 4


def test_every_figure_becomes_a_file_of_every_format(tmp_path):
    planted(tmp_path / "made", {("linear", name, 0): curve(4.0, 2.0) for name in ("uniform", "minsnr")})
    paths = write_figures(tmp_path / "made", tmp_path / "figures")
    kinds = ("quality", "loss", "density", "objective", "samples")
    assert {path.name for path in paths} == {f"{kind}.{end}" for kind in kinds for end in ("png", "svg", "pdf")}
    for path in paths:
        if path.suffix == ".png":
            seen = np.asarray(Image.open(path).convert("L"))
            assert min(seen.shape) > 300
            assert seen.std() > 5
    text = (tmp_path / "figures" / "quality.svg").read_text()
    assert ">FID (lower is better)<" in text  # words stay words
    assert COLOURS[0] in text
    assert (tmp_path / "figures" / "loss.pdf").read_bytes().startswith(b"%PDF")


def test_several_schedules_have_figures_of_their_own():
    curves = {(process, "uniform", 0): curve(4.0, 2.0) for process in ("linear:steps=100", "flow")}
    figures = all_figures(Subject(compared(curves)))
    assert list(figures) == ["quality-linear-steps=100", "loss-linear-steps=100", "quality-flow", "loss-flow"]


def test_no_word_of_a_figure_is_cut_or_lies_on_another(tmp_path):
    long = ("adaptive:target=(minsnr),correction=none", "logit_normal+minsnr:gamma=5")
    names = ["uniform", *long, *(f"speed:k={k}" for k in range(2, 6))]
    planted(tmp_path, {("linear", name, 0): curve(40.0, 2.0, steps=200_000) for name in names})
    with mpl.rc_context(STYLE):
        for name, figure in all_figures(read_subject(tmp_path)).items():
            figure.savefig(io.BytesIO(), dpi=100)
            texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
            unseen = [text for axes in figure.axes for text in beyond(axes)]
            boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text not in unseen]
            assert len(boxes) > 10
            for i, (word, box) in enumerate(boxes):
                assert min(box.x0, box.y0) > -1, (name, word)
                assert box.x1 < figure.bbox.x1 + 1, (name, word)
                assert box.y1 < figure.bbox.y1 + 1, (name, word)
                lies_on = [other for other, where in boxes[i + 1 :] if overlap(box, where)]
                assert not lies_on, (name, word, lies_on)


def beyond(axes):
    """Words that are not drawn: ticks beyond the ends of their axis, and all of axes that are not shown."""
    if not axes.get_visible():
        return axes.findobj(Text)
    found = []
    for axis, (low, high), k in ((axes.xaxis, axes.get_xlim(), 0), (axes.yaxis, axes.get_ylim(), 1)):
        found += [text for text in axis.get_ticklabels() if not low <= text.get_position()[k] <= high]
    return found


def overlap(one, other):
    return min(one.x1, other.x1) - max(one.x0, other.x0) > 1 and min(one.y1, other.y1) - max(one.y0, other.y0) > 2


def test_a_long_name_is_folded_where_its_parts_end():
    assert folded("adaptive:target=(minsnr),correction=none") == "adaptive:\ntarget=(minsnr),\ncorrection=none"
    assert folded("adaptive+minsnr") == "adaptive+minsnr"


def test_figures_of_one_run_and_of_an_unknown_format(tmp_path):
    run = planted(tmp_path / "made", {("linear", "uniform", 0): curve(2.0)}).outcomes[0]
    names = [path.name for path in write_figures(run.folder, tmp_path / "figures", ["png"])]
    assert names == ["training.png", "quality.png", "loss.png", "density.png", "objective.png", "samples.png"]
    with pytest.raises(ValueError, match="choose from png, svg, pdf"):
        write_figures(run.folder, tmp_path / "other", ["gif"])
    assert not (tmp_path / "other").exists()
