"""noisewise preview: what it prints, writes and draws are the numbers of `preview`; mistakes name their remedy."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

import noisewise
from noisewise import Flow, Objective
from noisewise.commands.cli import main
from noisewise.commands.preview import BLOCKS, COLUMNS, chart, columns
from noisewise.looking.recipe_curves import limits, preview
from noisewise.spec import build_process


@pytest.fixture(autouse=True)
def clean_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOISEWISE_TRACEBACK", raising=False)


def curves_of(spec, process, prediction, weight_of="model"):
    objective = Objective(process, prediction)
    recipe = noisewise.recipe(spec, objective)
    return preview(recipe.sampler, recipe.weighting, process, objective=objective, weight_of=weight_of, title=spec)


def saved_scheduler(folder, name="DDPMScheduler", **settings):
    import diffusers

    getattr(diffusers, name)(**settings).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("scheduler", "prediction"),
    [("linear", "eps"), ("cosine:steps=400", "eps"), ("flow", "flow"), ("edm", "edm"), ("ve", "eps")],
)
def test_the_json_holds_the_numbers_of_preview(scheduler, prediction):
    command = ["preview", "--scheduler", scheduler, "--sampler", "logit_normal:correction=tempered(0.5)", "--weighting", "p2"]
    assert main([*command, "--compare", "uniform", "mode+minsnr:gamma=1", "--json", "numbers/found.json"]) == 0
    found = json.loads(Path("numbers/found.json").read_text())
    assert (found["scheduler"], found["prediction"], found["weight_of"]) == (scheduler, prediction, "model")
    specs = ["logit_normal:correction=tempered(0.5)+p2", "uniform", "mode+minsnr:gamma=1"]
    assert [recipe["spec"] for recipe in found["recipes"]] == specs
    for recipe in found["recipes"]:
        expected = curves_of(recipe["spec"], build_process(scheduler), prediction)
        for axis in ("u", "time", "log_snr"):
            np.testing.assert_array_equal(found[axis], getattr(expected, axis))
            assert recipe["quantiles"][axis] == expected.quantiles(axis=axis)
        for curve in ("p", "w", "pw"):
            np.testing.assert_array_equal(recipe[curve], getattr(expected, curve))
        assert recipe["thirds"] == expected.shares(3)
        assert recipe["effective_share"] == expected.effective_share


def test_the_prediction_and_whose_weight_can_be_chosen():
    given = ["preview", "--scheduler", "linear", "--sampler", "minsnr", "--json", "found.json"]
    assert main([*given, "--prediction", "v", "--weight-of", "eps"]) == 0
    found = json.loads(Path("found.json").read_text())
    assert (found["prediction"], found["weight_of"]) == ("v", "eps")
    np.testing.assert_array_equal(found["recipes"][0]["w"], curves_of("minsnr", build_process("linear"), "v", "eps").w)


def test_what_is_printed_is_what_was_found(capsys):
    assert main(["preview", "--scheduler", "linear", "--sampler", "logit_normal", "--weighting", "minsnr:gamma=5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    curves = curves_of("logit_normal+minsnr:gamma=5", build_process("linear"), "eps")
    assert lines[:3] == [
        "linear, eps prediction; w is the weight of the model's own eps loss",
        "",
        "logit_normal+minsnr:gamma=5",
    ]
    for axis in ("time", "log_snr"):
        assert all(f"  {line}" in lines for line in chart(curves, axis, limits([curves], axis)))
    rows = [line.split() for line in lines]
    assert ["of", "the", "draws", "u", *(f"{u:.3f}" for u in curves.quantiles()["p"])] in rows
    assert ["t", *(f"{t:g}" for t in curves.quantiles(axis="time")["pw"])] in rows
    assert ["log", "SNR", *(f"{value:.2f}" for value in curves.quantiles(axis="log_snr")["p"])] in rows
    assert "  thirds of u, least noise first: draws 24% 51% 24%, objective 23% 52% 25%" in lines
    assert "  effective sample size: 100% of a batch, for its importance weights" in lines


def test_the_chart_of_known_curves():
    flat = curves_of("uniform", Flow(), "flow")
    heading, p, w, pw = chart(flat, "time", (0.0, 1.0))
    assert heading == "over t, 0 to 1 (noise →)"
    assert [line.split() for line in (p, w, pw)] == [[name, "█" * 60, "max", "1"] for name in ("p", "w", "p·w")]
    stairs = curves_of("speed:k=4,tau=250", build_process("linear"), "eps")
    drawn = chart(stairs, "time", (0.0, 1000.0))[1]
    assert drawn == "  p   " + "█" * 15 + "▂" * 45 + "  max 2.29"  # 4 and 1 over 7/4; a quarter of eight blocks is two
    rising = columns(curves_of("beta:a=2,b=1", Flow(), "flow"), "time", "p", (0.0, 1.0))
    np.testing.assert_allclose(rising, (np.arange(COLUMNS) + 0.5) / COLUMNS * 2, atol=0.01)
    symmetric = columns(curves_of("logit_normal", Flow(), "flow"), "log_snr", "p", (8.0, -8.0))
    np.testing.assert_allclose(symmetric, symmetric[::-1], rtol=0.01, atol=1e-4)


def test_nothing_is_blank_and_a_trace_is_not():
    np.save("density.npy", [1.0, 0.0, 0.005])
    curves = curves_of("table:file=density.npy", Flow(), "flow")
    drawn = chart(curves, "time", (0.0, 1.0))[1][6:66]
    assert set(drawn[:20]) == {BLOCKS[-1]}
    assert set(drawn[21:39]) == {" "}
    assert set(drawn[41:]) == {BLOCKS[1]}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("adaptive", "this sampler learns: p is what it draws before the first step"),
        ("mix:of=(loss_adaptive)", "this sampler learns"),
        (
            "curriculum:start=(uniform),end=(logit_normal)",
            "this sampler changes over training: p is what it draws at the first step",
        ),
        ("uniform+learned", "this weighting is learned: w is what it is before the first step"),
        ("logit_normal+minsnr", None),
    ],
)
def test_what_training_will_change_is_said(spec, said, capsys):
    assert main(["preview", "--scheduler", "linear", "--sampler", spec, "--json", "found.json"]) == 0
    printed, notes = capsys.readouterr().out, json.loads(Path("found.json").read_text())["recipes"][0]["notes"]
    assert all(note in printed for note in notes)
    assert notes == [] if said is None else said in notes[0]


@pytest.mark.parametrize(("spec", "said"), [("adaptive", "MinSNR"), ("adaptive:target=p2", "P2"), ("adaptive+minsnr", None)])
def test_a_target_that_the_importance_weight_carries_is_said(spec, said, capsys):
    assert main(["preview", "--scheduler", "flow", "--sampler", spec]) == 0
    found = [line for line in capsys.readouterr().out.splitlines() if "draw.weight" in line]
    assert len(found) == (said is not None)
    assert said is None or f"the weight of its target, {said}, too" in found[0]


def test_a_picture_of_several_recipes(capsys):
    command = ["preview", "--scheduler", "flow:time_scale=1000", "--sampler", "logit_normal", "--compare", "uniform", "mode"]
    assert main([*command, "--out", "pictures/compared.png"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(Path("pictures/compared.png"))
    pixels = (image.imread("pictures/compared.png")[..., :3] * 255).round().astype(int)
    for colour in ("#0072B2", "#D55E00", "#009E73"):
        exact = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert (np.abs(pixels - exact).max(-1) < 3).sum() > 500, colour


def test_the_scheduler_of_a_diffusers_pipeline():
    saved_scheduler("sd3/scheduler", "FlowMatchEulerDiscreteScheduler", shift=3.0)
    for path in ("sd3", "sd3/scheduler", "sd3/scheduler/scheduler_config.json"):
        assert main(["preview", "--scheduler", path, "--json", "found.json"]) == 0
        found = json.loads(Path("found.json").read_text())
        assert found["prediction"] == "flow"
        times, at = found["recipes"][0]["quantiles"]["time"]["p"], np.array([0.05, 0.25, 0.5, 0.75, 0.95])
        np.testing.assert_allclose(times, 1000 * 3 * at / (1 + 2 * at), atol=3)
    assert main(["preview", "--scheduler", "sd3", "--shift", "1", "--json", "found.json"]) == 0
    times = json.loads(Path("found.json").read_text())["recipes"][0]["quantiles"]["time"]["p"]
    np.testing.assert_allclose(times, 1000 * at, atol=1.01)


def test_zero_terminal_snr_and_v_prediction_are_read_off_the_file():
    saved_scheduler("v", prediction_type="v_prediction", rescale_betas_zero_snr=True)
    assert main(["preview", "--scheduler", "v", "--sampler", "minsnr", "--json", "found.json", "--out", "v.png"]) == 0
    found = json.loads(Path("found.json").read_text())
    assert found["prediction"] == "v"
    assert found["log_snr"][-1] is None
    assert None not in found["log_snr"][:-1]
    assert min(found["recipes"][0]["w"]) >= 0
    assert Path("v.png").stat().st_size > 10_000


def test_a_folder_with_the_name_of_a_process_is_not_taken_for_one():
    saved_scheduler("linear", "FlowMatchEulerDiscreteScheduler")
    for path, prediction in (("linear", "eps"), ("./linear", "flow")):
        assert main(["preview", "--scheduler", path, "--json", "found.json"]) == 0
        assert json.loads(Path("found.json").read_text())["prediction"] == prediction


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["linaer"], "did you mean 'linear'"),
        (["linaer"], "or the path of a diffusers scheduler_config.json"),
        (["no/where"], "no scheduler_config.json at no/where"),
        (["missing.json"], "no scheduler_config.json at missing.json"),
        (["broken.json"], "broken.json is not JSON"),
        (["other.json"], "'os.system' is not a scheduler of diffusers"),
        (["linear:stepps=10"], "did you mean 'steps'"),
        (["linear", "--sampler", "unifrm"], "did you mean 'uniform'"),
        (["linear", "--compare", "uniform", "speeed"], "did you mean 'speed'"),
        (["linear", "--weighting", "minsrn"], "did you mean 'minsnr'"),
        (["linear", "--weighting", "logit_normal"], "names the sampler logit_normal, but only a weighting can stand here"),
        (["flow", "--shift", "2.5"], 'flow is none: instead write --sampler "shift:of=(uniform),shift=2.5"'),
        (
            ["flow", "--mu", "1.15"],
            "--mu is for diffusers' schedulers, and flow is none: instead write --sampler \"shift:of=(uniform),",
        ),
        (["flow", "--mu", "1.15"], "shift=3.158"),
        (["linear", "--mean", "3"], "linear is none: instead write --scheduler edm:mean=3\n"),
        (["edm", "--std", "0.5"], "edm is none: instead write --scheduler edm:std=0.5\n"),
        (["linaer", "--mean", "3"], "did you mean 'linear'"),
        (["linear", "--out", "picture"], "give the picture an ending, such as picture.png"),
        (["linear", "--out", "picture.doc"], "doc"),
        (["linear", "--out", "other.json/x.png"], "--out other.json/x.png cannot be written: "),
        (["linear", "--json", "other.json/x"], "--json other.json/x cannot be written: "),
    ],
)
def test_mistakes_name_their_remedy(arguments, message, capsys):
    Path("broken.json").write_text("{")
    Path("other.json").write_text('{"_class_name": "os.system"}')
    assert main(["preview", "--scheduler", *arguments]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def run_without(modules, *arguments, **environment):
    hide = f"import sys; sys.modules.update(dict.fromkeys({modules}))"
    code = f"{hide}; from noisewise.commands.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "preview", *arguments]
    root = str(Path(__file__).parents[2])
    environment = {"PATH": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": root, **environment}
    return subprocess.run(command, env=environment, capture_output=True, timeout=120)


EXTRAS = ["accelerate", "diffusers", "jsonargparse", "matplotlib", "PIL", "rich", "safetensors", "scipy", "yaml"]


def test_our_own_names_need_no_extra_and_a_picture_says_what_it_needs():
    done = run_without(EXTRAS, "--scheduler", "linear", "--sampler", "adaptive", "--out", "x.png", PYTHONIOENCODING="ascii")
    assert done.returncode == 1
    assert done.stderr.decode().strip() == "noisewise: no picture: drawing needs matplotlib: pip install 'noisewise[train]'"
    printed = done.stdout.decode("ascii")
    assert f"p   {'@' * 60}  max 1" in printed  # a terminal without Unicode gets plain characters
    assert "effective sample size" in printed


def test_a_saved_scheduler_without_diffusers_says_what_it_needs():
    Path("scheduler_config.json").write_text('{"_class_name": "DDPMScheduler"}')
    done = run_without(EXTRAS, "--scheduler", "scheduler_config.json")
    assert done.returncode == 1
    assert "needs diffusers: pip install diffusers" in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()
