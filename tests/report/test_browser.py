"""What readers meet: the report of the digits demo and of a synthetic comparison, in a browser."""

import json
from pathlib import Path

import pytest

from noisewise.commands import cli
from noisewise.report import write_report
from noisewise.study.outcome import read_comparison
from tests.report.browser import CUT, chromium, opened, pixels, reach, shown
from tests.study.made import curve, planted
from tests.training.tiny import DIT

LONG = "adaptive:target=(minsnr),correction=none"


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A real comparison, as short as can be."""
    folder = tmp_path_factory.mktemp("digits") / "out"
    what = ["--preset", "digits", "--samplers", "uniform,adaptive", "--seeds", "1", "--images", "64"]
    size = ["--budget", "8it", "--batch", "16", "--log.every", "2", "--model.name", "dit", "--model.options", json.dumps(DIT)]
    assert cli.main(["compare", *what, *size, "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    """Two schedules, four methods, two seeds, three moments, a long name, and a run that failed."""
    folder = tmp_path_factory.mktemp("synthetic")
    curves = {
        (process, sampler, seed): curve(*(scale * (1 + seed / 10) * value for value in (90, 40, 25)), steps=20000, seconds=900)
        for process in ("linear", "cosine")
        for sampler, scale in (("uniform", 1), ("minsnr", 0.9), (LONG, 0.7), ("speed:k=5+change_aware", 0.8))
        for seed in (0, 1)
    }
    lost = ("linear", "p2", 0)
    planted(folder, curves, budget="900s", failures={lost: "the loss <b>is not</b> finite for 20 steps in a row"})
    return folder


@pytest.fixture(scope="module")
def page_of_digits(digits):
    return write_report(digits).as_uri()


@pytest.fixture(scope="module")
def page_of_synthetic(synthetic):
    return write_report(synthetic).as_uri()


@pytest.fixture(params=["digits", "synthetic"])
def page_of(request):
    return request.getfixturevalue(f"page_of_{request.param}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_nothing_is_blank_cut_or_complained_about(browser, page_of, size, scheme):
    with opened(browser, page_of, size, color_scheme=scheme) as page:
        assert page.evaluate(CUT) == []
        seen = pixels(page)
        paper = seen[5, 5]
        assert (paper.mean() > 240) == (scheme == "light")
        inked = (abs(seen.astype(int) - paper).sum(2) > 60).mean()
        assert 0.02 < inked < 0.6
        for name in ("svg.chart", "svg.heat", ".shot img"):
            part = page.locator(f"{name} >> visible=true").first
            box = reach(part)
            assert box["width"] > 100
            assert box["height"] > 100


def test_all_of_it_is_there_without_javascript_and_on_paper(browser, page_of_synthetic):
    with opened(browser, page_of_synthetic, java_script_enabled=False) as page:
        assert shown(page, ".schedule svg.chart") == 8
        assert shown(page, "svg.heat") == 8
        assert shown(page, ".shot") == 8
    with opened(browser, page_of_synthetic, color_scheme="dark") as page:
        page.uncheck("#show-1", force=True)
        page.emulate_media(media="print", color_scheme="dark")
        assert shown(page, ".schedule svg.chart") == 8
        assert shown(page, 'g.series[data-method="1"]') == 16
        assert shown(page, ".controls, .slider, .choice, nav") == 0
        assert pixels(page)[5, 5].mean() == 255


def test_a_method_can_be_left_out_everywhere_at_once(browser, page_of_synthetic):
    with opened(browser, page_of_synthetic) as page:
        drawn = ('g.series[data-method="2"]', 'figure[data-method="2"]')  # a band and a line in each chart; heat map, samples
        before = [shown(page, selector) for selector in drawn]
        assert before == [8, 2]
        page.focus("#show-2")
        page.keyboard.press("Space")
        assert [shown(page, selector) for selector in drawn] == [0, 0]
        assert shown(page, 'g.series[data-method="1"]') == before[0]
        assert page.locator('table.results tr[data-method="2"]').first.evaluate("e => getComputedStyle(e).opacity") == "0.35"
        page.keyboard.press("Space")
        assert [shown(page, selector) for selector in drawn] == before


def test_one_schedule_is_shown_at_a_time(browser, page_of_synthetic):
    with opened(browser, page_of_synthetic) as page:
        assert shown(page, '.schedule[data-schedule="0"] svg.chart') == 4
        assert shown(page, '.schedule[data-schedule="1"] svg.chart') == 0
        page.check("#schedule-1", force=True)
        assert shown(page, '.schedule[data-schedule="0"] svg.chart') == 0
        assert shown(page, '.schedule[data-schedule="1"] svg.chart') == 4
        assert page.evaluate(CUT) == []


def test_the_slider_goes_through_training_and_seeds_can_be_chosen(browser, page_of_synthetic):
    with opened(browser, page_of_synthetic) as page:

        def seen():
            texts = page.locator(".shot >> visible=true").all_inner_texts()
            return page.inner_text("#moment-text"), texts[0], len(texts)

        assert seen() == ("100 % of the budget", "step 20,000, FID 25", 4)
        page.focus("#moment")
        page.keyboard.press("ArrowLeft")
        assert seen() == ("67 % of the budget", "step 13,333, FID 40", 4)
        assert page.get_attribute("#moment", "aria-valuetext") == "67 % of the budget"
        page.check("#seed-1", force=True)
        assert seen() == ("67 % of the budget", "step 13,333, FID 44", 4)


def test_numbers_appear_under_the_pointer(browser, page_of_synthetic):
    with opened(browser, page_of_synthetic) as page:
        mark = page.locator('#quality-0-quality-steps g[data-method="1"] use').last
        box = reach(mark)
        page.mouse.move(box["x"] + 3, box["y"] + 3)
        said = page.inner_text("#tip").split("\n")
        assert said[0] == "minsnr"
        assert "FID 23.63" in said  # (0.9 * 25 + 0.9 * 27.5) / 2 = 23.625
        assert "step: 20,000" in said
        assert "seed 0: 22.5" in said
        assert "seed 1: 24.75" in said
        assert shown(page, "#quality-0-quality-steps .hover circle") == 3


def test_the_heat_map_says_its_numbers_and_has_two_views(browser, synthetic, page_of_synthetic):
    run = next(one for one in read_comparison(synthetic).outcomes if one.sampler == "minsnr" and one.process == "linear")
    density = run.metrics()[-1]["density_by_level"]
    with opened(browser, page_of_synthetic) as page:
        assert shown(page, "image.draws") == 0
        page.check("#view-draws", force=True)
        image = reach(page.locator("#density-0-1 image.draws"))
        x, y = image["x"] + image["width"] * 10.5 / 50, image["y"] + 2

        def said():
            page.mouse.move(x, y)
            return page.inner_text("#tip").split("\n")

        title, times, place, step = said()
        assert title == "minsnr"
        assert float(times.removesuffix(" times uniform")) == pytest.approx(density[10], rel=0.005)
        assert place.startswith("u 0.21, log SNR ")
        assert step.startswith("step 19,")
        page.check("#view-objective", force=True)
        assert shown(page, "image.draws") == 0
        page.mouse.move(0, 0)
        assert shown(page, "#tip") == 0
        assert said()[1] == "1 times uniform"
        page.mouse.move(x, image["y"] + image["height"] - 2)
        assert int(page.inner_text("#tip").rpartition("step ")[2].replace(",", "")) < 1000  # training goes up


def test_a_hostile_name_does_nothing(browser, tmp_path):
    name = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
    folder = tmp_path / "hostile"
    planted(folder, {("linear", "uniform", 0): curve(2.0)}, failures={("linear", "minsnr", 0): name})
    plan = json.loads((folder / "comparison.json").read_text())
    (folder / "comparison.json").write_text(json.dumps({**plan, "name": name}))
    with opened(browser, Path(write_report(folder)).as_uri()) as page:
        assert page.title().startswith("noisewise: ")
        assert name in page.inner_text("header")
        assert shown(page, "main img") == 1
