"""Numbers in the page on speed, and those that README and changelog take from it, are those of the result files."""

import inspect
import json
import re
from pathlib import Path
from statistics import fmean

import pytest

from noisewise.training.fast import choose, graphs

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "speed.md").read_text()
README = " ".join((ROOT / "README.md").read_text().split())
CHANGELOG = " ".join((ROOT / "CHANGELOG.md").read_text().split())
MODELS = ("small", "paper")
PEAK = 989e12  # as in benchmarks/throughput.py
REMAKE = "run docs/make_speed_figures.py"


def rows(name):
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def table(name):
    """The rows of a table that docs/make_speed_figures.py fills in, without its headings; cells without backticks."""
    found = re.search(rf"<!-- table: {re.escape(name)} -->\n(.*?)<!-- end -->", PAGE, re.DOTALL)
    assert found, f"speed.md has no table {name}"
    lines = found[1].strip().splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def speeds(model):
    return {row["path"]: row for row in rows("throughput.jsonl") if row["model"] == model and "steps_per_second" in row}


def rate(model, path):
    return speeds(model)[path]["steps_per_second"]


def any_order(model, path):
    """The speed in the run before all kernels were held to a fixed order of adding."""
    found = [row for row in rows("throughput_any_order.jsonl") if (row["model"], row["path"]) == (model, path)]
    return next(row["steps_per_second"] for row in found if "steps_per_second" in row)


def profile():
    return json.loads((RESULTS / "step_profile.json").read_text())


# Tables


@pytest.mark.parametrize("model", MODELS)
def test_the_speeds_are_those_measured(model):
    measured, shown = speeds(model), table(f"paths, {model}")
    assert [cells[0] for cells in shown] == list(measured)
    for path, speed, ratio, images, share, memory in shown:
        row = measured[path]
        assert speed == "{steps_per_second:.1f} ({slowest:.1f} to {fastest:.1f})".format(**row), REMAKE
        assert ratio == f"{row['steps_per_second'] / rate(model, 'script, fp32'):.2f}", REMAKE
        assert images == f"{row['images_per_second']:.0f}", REMAKE
        assert share == f"{100 * row['share_of_floor']:.1f} %", REMAKE
        assert memory == f"{row['memory_gib']:.1f} GiB", REMAKE


def test_every_path_is_explained():
    explained = re.findall(r"^\| `([^`]+)` \|", PAGE.partition("| path | what |")[2].partition("\n\n")[0], re.MULTILINE)
    assert explained == list(speeds("small")) == list(speeds("paper"))


def test_the_set_up_times_are_those_measured():
    measured = {(row["model"], row["caches"]): row for row in rows("throughput.jsonl") if "caches" in row}
    sizes = {model: f"{speeds(model)['fast']['parameters'] / 1e6:.1f} M" for model in MODELS}
    expected = [
        [sizes[m], *(f"{measured[m, caches]['setup_seconds']:.0f} s" for caches in ("empty", "filled"))] for m in MODELS
    ]
    assert table("set-up") == expected, REMAKE
    assert {(row["at_once"], row["threads"]) for row in measured.values()} == {(2, 16)}
    assert "Both networks were set up at the same time on 16 cores." in PAGE
    before = {(row["model"], row["caches"]): row for row in rows("throughput_any_order.jsonl") if "caches" in row}
    earlier = [f"{before['small', caches]['setup_seconds']:.0f} s" for caches in ("empty", "filled")]
    assert f"an earlier run had {earlier[0]} and {earlier[1]}" in PAGE


def test_the_profile_is_that_of_the_file():
    models, shown = profile()["models"], table("profile")
    assert shown[-1][0] == "all"
    assert sorted(cells[0] for cells in shown[:-1]) == sorted(models["small"]["kinds"]) == sorted(models["paper"]["kinds"])
    for kind, *cells in shown:
        expected = []
        for model in MODELS:
            whole = models[model]
            part = whole if kind == "all" else whole["kinds"][kind]
            share = 100 * part["microseconds"] / whole["microseconds"]
            expected += [f"{part['microseconds']:.0f}", f"{share:.1f} %", f"{part['launches']:.0f}"]
        assert cells == expected, REMAKE


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("field", ["microseconds", "launches"])
def test_the_kinds_of_the_profile_are_sums_of_its_kernels_and_of_what_is_not_listed(model, field):
    found = profile()["models"][model]
    *kinds, rest = found["kinds"]
    assert {kernel["kind"] for kernel in found["kernels"]} == set(kinds)
    for kind in kinds:
        listed = sum(kernel[field] for kernel in found["kernels"] if kernel["kind"] == kind)
        assert found["kinds"][kind][field] == pytest.approx(listed, abs=0.06), kind
    assert "not listed" in rest
    assert sum(kind[field] for kind in found["kinds"].values()) == pytest.approx(found[field], abs=0.6)


def test_the_times_of_generation_are_those_measured():
    shown, measured = table("generation"), rows("generation.jsonl")
    assert len(shown) == len(measured)
    for (what, how, *cells), row in zip(shown, measured, strict=True):
        times = [f"{row['seconds']:.1f} s", f"{row['memory_gib']:.1f} GiB"]
        assert cells == [row["precision"], str(row["batch"]), *times], REMAKE
        assert (row["part"] == "total") == (what == "from noise to the FID")
        assert ("graph" in row["path"]) == how.startswith("recorded")
        assert ("first" in row["path"]) == ("first" in how)
        assert (row["images"], row.get("steps", 50), row["machine"]) == (5000, 50, "NVIDIA H200")
    assert "5,000 images of the 9.0 M network with 50 steps of DDIM on one H200" in PAGE


def test_the_reasons_are_those_of_the_code():
    reasons = re.findall(r"^\| `([^`]+)` \|", PAGE.partition("| reason |")[2].partition("\n\n")[0], re.MULTILINE)
    code = inspect.getsource(choose) + inspect.getsource(graphs)
    for reason in reasons:
        assert all(part in code for part in reason.split("...")), reason
    silent = ("fast=never asks for the plain one", "it needs a CUDA device")
    in_choose = [
        text for text in re.findall(r'return f?"([^"]+)"', inspect.getsource(choose.why_not)) if not text.startswith(silent)
    ]
    assert len(reasons) == len(in_choose) + 1  # a step that cannot be recorded
    assert 'tell(f"the plain path, not the fast one: ' in code
    assert "`the plain path, not the fast one:`" in PAGE


# Sentences


def test_all_speeds_are_of_one_run_under_the_conditions_that_the_page_names():
    found = [row for model in MODELS for row in speeds(model).values()]
    fields = ("noisewise", "torch", "python", "machine", "threads", "arguments", "git", "batch", "blocks")
    assert len({json.dumps([row[field] for field in fields]) for row in found}) == 1
    assert (found[0]["machine"], found[0]["batch"], found[0]["blocks"]) == ("NVIDIA H200", 128, 5)
    assert "(32×32 images, batch 128," in PAGE
    assert "the median of 5 blocks of steps" in PAGE
    about = profile()
    assert all(about[field] == found[0][field] for field in ("torch", "python", "machine"))
    assert f"The {len(about['models']['paper']['kernels'])} kernels that take most" in PAGE


def test_what_is_said_of_the_speeds_is_in_the_file():
    small, paper = (speeds(model) for model in MODELS)
    fast, script = ([found[path]["steps_per_second"] for found in (small, paper)] for path in ("fast", "script, fp32"))
    assert f"makes {fast[0]:.1f} steps a second with the U-Net of 9.0 M parameters" in PAGE
    assert f"and {fast[1]:.1f} with that of 35.7 M" in PAGE
    assert f"most people write it makes {script[0]:.1f} and {script[1]:.1f} in the same run" in PAGE
    work = [found["fast"]["operations_per_step"] for found in (small, paper)]
    assert f"has {work[1] / work[0]:.1f} times the arithmetic" in PAGE
    assert f"a step would take {1e3 * work[0] / PEAK:.1f} ms and {1e3 * work[1] / PEAK:.1f} ms" in PAGE
    assert f"the script takes {1e3 / script[0]:.0f} ms and {1e3 / script[1]:.0f} ms" in PAGE
    adaptive = [found["fast"]["steps_per_second"] / found["fast, adaptive"]["steps_per_second"] for found in (small, paper)]
    assert f"takes {adaptive[0]:.3f} times uniform's time per step with the small network and {adaptive[1]:.3f} times" in PAGE
    spread = [
        100 * (paper[p]["fastest"] - paper[p]["slowest"]) / paper[p]["steps_per_second"] for p in ("fast", "script, fp32")
    ]
    assert spread[0] < 0.1
    assert f"of the large network are less than 0.1 % apart, the fp32 script's {spread[1]:.0f} %" in PAGE
    low = [found["script, bf16"]["steps_per_second"] / base for found, base in zip((small, paper), script, strict=True)]
    assert f"**bf16 in a script**: {low[0]:.2f} and {low[1]:.2f} times" in PAGE
    compiled = [found["plain, compiled"]["steps_per_second"] / base for found, base in zip((small, paper), script, strict=True)]
    assert f"**Compiling alone**: {compiled[0]:.2f} and {compiled[1]:.2f} times" in PAGE


def test_what_is_said_of_the_earlier_run_is_in_its_file():
    measured = rows("throughput_earlier.jsonl")
    earlier = {(row["model"], row["path"]): row["steps_per_second"] for row in measured}
    script, plain, tried = ([earlier[m, path] for m in MODELS] for path in ("script, fp32", "fast", "fast, benchmark"))
    now = [rate(model, "fast") for model in MODELS]
    assert f"made {script[0]:.1f} and {script[1]:.1f} steps a second (" in PAGE
    assert f"would be {now[0] / script[0]:.1f} and {now[1] / script[1]:.1f} times as fast" in PAGE
    assert f"from {plain[0]:.1f} to {tried[0]:.1f} and from {plain[1]:.1f} to {tried[1]:.1f} steps a second" in PAGE
    before = [[any_order(model, path) for model in MODELS] for path in ("fast", "graphs")]
    assert "which made {:.1f} and {:.1f} steps a second)".format(*before[0]) in PAGE
    graphs = [rate(model, "graphs") for model in MODELS]
    assert "`graphs` made {:.1f} and {:.1f} steps a second while".format(*before[1]) in PAGE
    assert f"and makes {graphs[0]:.1f} and {graphs[1]:.1f} now" in PAGE
    free = [rate(model, "fast, any kernel") / rate(model, "fast") for model in MODELS]
    assert f"the same step is {free[0]:.2f} and {free[1]:.2f} times as fast" in PAGE


def test_what_is_said_of_the_profile_is_in_the_file():
    models = profile()["models"]
    share, reached, casts, norms = [], [], [], []
    for model in MODELS:
        found = models[model]
        kinds, whole = found["kinds"], found["microseconds"]
        convolutions = sum(part["microseconds"] for kind, part in kinds.items() if kind.startswith("convolutions"))
        share.append(100 * convolutions / whole)
        reached.append(100 * found["operations_per_step"]["convolutions"] / (convolutions * 1e-6) / PEAK)
        casts.append(100 * kinds["casts alone"]["microseconds"] / whole)
        norms.append(f"{100 * kinds['normalisation']['microseconds'] / whole:.0f}")
        assert whole == pytest.approx(1e6 / any_order(model, "fast"), rel=0.02)  # the GPU does not wait
        assert round(found["launches"], -2) == 1500
        assert sum(found["operations_per_step"].values()) == speeds(model)["fast"]["operations_per_step"]
    assert f"**convolutions**, {share[0]:.0f} % and {share[1]:.0f} % of it" in PAGE
    assert f"at most {reached[0]:.0f} % of the arithmetic peak in the small network" in PAGE
    assert f"at most {reached[1]:.0f} % in the large one" in PAGE
    assert norms == ["17", "17"]
    assert "**normalisation**, 17 % in both" in PAGE
    rest = models["small"]["kinds"]["shorter kernels, not listed"]
    assert f"the {rest['launches']:.0f} that are not listed take {rest['microseconds'] / rest['launches']:.1f} µs each" in PAGE
    assert f"take {casts[0]:.1f} % of a step of the small network and {casts[1]:.1f} % of the large one" in PAGE


def test_what_is_said_of_the_loss_curves_is_in_the_file():
    curves, held_out = {}, {}
    for row in rows("loss_curves.jsonl"):
        assert (row["preset"], row["sampler"]) == ("cifar10-small", "uniform")
        if "loss" in row:
            curves.setdefault(row["path"], {})[row["step"]] = row["loss"]
        else:
            held_out[row["path"]] = row["held_out_mean"]
    steps = list(curves["plain"])
    assert steps == list(curves["fast"]) == list(curves["plain, another seed"]) == list(range(50, 2001, 50))
    fast, other = ([curves[p][s] / curves["plain"][s] - 1 for s in steps] for p in ("fast", "plain, another seed"))

    def size(differences):
        return [100 * summary(abs(value) for value in differences) for summary in (fmean, max)]

    assert "differ by {:.2f} % on average, and by {:.2f} % at most".format(*size(fast)) in PAGE
    assert "Another seed differs by {:.1f} % on average, and by {:.1f} % at most".format(*size(other)) in PAGE
    assert f"the fast path is above in {sum(value > 0 for value in fast)} of {len(fast)}" in PAGE
    shown = [f"{held_out[path]:.6f}" for path in ("fast", "plain", "plain, another seed")]
    assert "is {} on the fast path, {} on the plain one, and {} with the other seed".format(*shown) in PAGE


def test_what_is_said_of_cpus_is_in_the_file():
    (row,) = [row for row in rows("trainer_profile.jsonl") if row["sampler"] == "adaptive"]
    assert f"{100 * row['outside']:.1f} % of a step of the demo is spent outside" in PAGE


def test_readme_and_changelog_take_their_figures_from_the_files():
    (small, small_script), (paper, paper_script) = ([rate(m, path) for path in ("fast", "script, fp32")] for m in MODELS)
    assert f"{paper:.1f} steps a second with the 35.7 M-parameter" in README
    assert (
        f"a plain fp32 script makes {paper_script:.1f}, and {small:.1f} instead of {small_script:.1f} with a 9.0 M one"
        in README
    )
    adaptive = sorted(rate(model, "fast") / rate(model, "fast, adaptive") for model in MODELS)
    assert f"`adaptive+none` took {adaptive[0]:.2f} to {adaptive[1]:.2f} times uniform's time" in README
    (total,) = [r["seconds"] for r in rows("generation.jsonl") if (r["part"], r["path"]) == ("total", "fused, graph")]
    assert f"50 DDIM steps and their FID take {total:.1f} s" in README
    assert f"their features and the FID in {total:.1f} s" in CHANGELOG
    assert f"{small:.1f} steps a second with the U-Net of 9.0 M parameters and {paper:.1f} with that of 35.7 M" in CHANGELOG
    assert f"{small / small_script:.1f} and {paper / paper_script:.1f} times a plain float32 script" in CHANGELOG


def test_the_pictures_are_there_and_small():
    shown = re.findall(r"\(img/(\w+\.png)\)", PAGE)
    assert shown == ["speed_paths.png", "speed_losses.png"]
    assert all((ROOT / "docs" / "img" / name).stat().st_size < 120_000 for name in shown)
