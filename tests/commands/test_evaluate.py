"""noisewise evaluate, as a user calls it."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from noisewise.commands.cli import main
from noisewise.data import open_data
from noisewise.generation.trained import load_trained
from noisewise.metrics.digits_features import digits_features
from noisewise.metrics.dinov2 import DINOv2
from noisewise.metrics.frechet import features_distance
from noisewise.metrics.heldout import held_out_losses
from noisewise.metrics.likelihood import variational_bound
from noisewise.metrics.optimal_loss import FILE, load_optimal_loss, optimal_loss
from noisewise.plain_files import read_rows
from noisewise.report.opening import measures
from noisewise.training.config import EvaluationConfig
from noisewise.training.options import as_yaml, load_config
from tests.generation.runs import checkpoint_of, copy_of_run, trained_once
from tests.metrics.sets import digits

FAST = ("--device", "cpu", "--batch", "25", "--heldout", "20", "--levels", "5")
OF_A_RUN = ("--solver", "ddim:steps=3", "--count", "60")


@pytest.fixture
def evaluate(tmp_path):
    """evaluate(target, options...) -> the result, from --json; None if the command failed."""

    def call(target, *options):
        out = tmp_path / "result.json"
        out.unlink(missing_ok=True)
        fast = FAST + OF_A_RUN * ((target / "config.yaml").exists() or target.parent.name == "checkpoints")
        status = main(
            ["evaluate", str(target), *fast, "--cache", str(tmp_path / "cache"), "--json", str(out), *map(str, options)]
        )
        assert (status == 0) == out.exists()
        return json.loads(out.read_text()) if status == 0 else None

    return call


@pytest.fixture
def run(tmp_path):
    return copy_of_run(tmp_path)


def rows(run):
    return [row for row in read_rows(run / "metrics.jsonl") if row.get("kind") == "evaluation"]


def without_environment(result):
    return {key: value for key, value in result.items() if key != "environment"}


def generated(run):
    (folder,) = (run / "generated").iterdir()
    return torch.from_numpy(np.concatenate([np.load(path) for path in sorted(folder.glob("chunk-*.npy"))]))


def test_a_run_is_measured_and_the_row_says_all_that_is_needed_to_repeat_it(run, evaluate, capsys):
    result = evaluate(run)
    assert rows(run) == [result]
    images = generated(run)
    assert images.shape == (60, 1, 8, 8)
    expected = features_distance(digits_features(images), digits_features(digits()))
    assert result["digits-frechet"] == pytest.approx(expected, rel=1e-4)
    assert (result["step"], result["weights"], result["images"], result["target"]) == (12, "ema", 60, "run")
    assert result["weights_sha256"] == load_trained(run).digest
    assert (result["data"], result["split"]) == ("digits", "train")
    assert result["data_fingerprint"] == open_data("digits").fingerprint()
    assert result["network"].startswith("digits-classifier-")
    assert result["preprocessing"] == "digits"
    generation = result["generation"]
    assert (generation["solver"], generation["seed"], generation["count"]) == ("ddim:steps=3,spacing=uniform", 0, 60)
    assert (generation["precision"], generation["guidance"], generation["label"]) == ("fp32", 1.0, None)
    assert {"noisewise", "torch", "processes"} <= set(result["environment"])
    assert (result["heldout"]["images"], len(result["heldout"]["loss_by_level"])) == (20, 5)
    assert result["heldout"]["loss"] == pytest.approx(np.mean(result["heldout"]["loss_by_level"]))
    shown = capsys.readouterr().out
    assert f"{'digits-frechet':22s} {result['digits-frechet']:.4f}" in shown


def test_solver_images_and_real_ones_are_those_of_the_configuration_unless_told_otherwise(run, tmp_path):
    config = load_config(run / "config.yaml")
    planned = EvaluationConfig(solver="ddpm:steps=3,variance=fixed_large", images=40, data="digits")
    (run / "config.yaml").write_text(as_yaml(replace(config, evaluation=planned)))
    common = [str(run), "--device=cpu"]
    for options, solver, count in (
        ([], "ddpm:steps=3,spacing=uniform,variance=fixed_large", 40),
        (["--steps=2"], "ddpm:steps=2,spacing=uniform,variance=fixed_large", 40),
        (["--solver=ddim:steps=2", "--count=50"], "ddim:steps=2,spacing=uniform", 50),
    ):
        assert main(["evaluate", *common, "--heldout=0", f"--cache={tmp_path / 'cache'}", *options]) == 0
        generation = rows(run)[-1]["generation"]
        assert (generation["solver"], generation["count"]) == (solver, count)
    assert main(["generate", *common, "--count=3", f"--out={tmp_path / 'images'}"]) == 0
    record = json.loads((tmp_path / "images" / "generation.json").read_text())
    assert record["solver"] == "ddpm:steps=3,spacing=uniform,variance=fixed_large"
    (run / "config.yaml").write_text(as_yaml(replace(config, evaluation=replace(planned, data="folder:nowhere"))))
    assert main(["evaluate", *common]) == 1


def test_training_evaluates_at_its_end_when_asked(tmp_path):
    arguments = ["--device=cpu", "--precision=fp32", "--batch=16", "--steps=4", "--log.trackers=[]", "--log.samples_every=0"]
    arguments += ['--model.options={"channels": 4, "multipliers": [1, 1], "blocks": 1, "attention": [], "groups": 2}']
    arguments += ["--evaluation.solver=ddim:steps=2", "--evaluation.images=30", f"--out={tmp_path / 'run'}"]
    assert main(["train", "--preset=digits", *arguments]) == 0
    assert rows(tmp_path / "run") == []
    assert main(["train", "--resume", "--steps=5", "--evaluation.at_end=true", *arguments[-1:]]) == 0
    (row,) = rows(tmp_path / "run")
    assert (row["step"], row["generation"]["solver"], row["images"]) == (5, "ddim:steps=2,spacing=uniform", 30)


def test_the_second_time_images_are_used_again_and_the_numbers_are_identical(run, evaluate):
    first = evaluate(run, "--metrics", "fid,kid,interval")
    (folder,) = (run / "generated").iterdir()
    times = {path.name: path.stat().st_mtime_ns for path in folder.glob("chunk-*")}
    assert without_environment(evaluate(run, "--metrics", "fid, kid, interval")) == without_environment(first)
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("chunk-*")} == times
    shutil.rmtree(run / "generated")
    assert without_environment(evaluate(run, "--metrics", "fid,kid,interval")) == without_environment(first)
    assert len(rows(run)) == 3


def test_another_batch_size_goes_on_with_the_same_images(run, evaluate):
    first = evaluate(run, "--metrics", "fid")
    assert evaluate(run, "--batch", 10)["digits-frechet"] == first["digits-frechet"]
    more = evaluate(run, "--batch", 10, "--count", 70)
    assert (more["images"], len(list((run / "generated").iterdir()))) == (70, 1)


def test_a_checkpoint_is_evaluated_into_its_run(run, evaluate):
    result = evaluate(checkpoint_of(run, 6), "--metrics", "none")
    assert (result["step"], result["target"]) == (6, "step-00000006")
    assert rows(run) == [result]
    assert not (run / "generated").exists()


def test_bits_per_dimension_without_images(run, evaluate):
    result = evaluate(run, "--metrics", "none", "--heldout", 0, "--vlb", 3)
    trained = load_trained(run)
    bound = variational_bound(trained.denoiser(), trained.objective.process, open_data("digits", split="test"), images=3)
    assert result["vlb"]["bits_per_dimension"] == pytest.approx(bound.total, rel=1e-6)
    assert (len(result["vlb"]["by_level"]), result["vlb"]["images"]) == (1000, 3)
    assert sum(result["vlb"]["by_level"]) + result["vlb"]["prior"] == pytest.approx(bound.total, rel=1e-6)
    assert "heldout" not in result
    assert not (run / "generated").exists()


def test_a_generated_folder_of_grey_pictures_is_compared_with_the_digits(run, evaluate, tmp_path):
    fast = ["--device", "cpu", "--solver", "ddim:steps=3", "--count", "60", "--batch", "25"]
    assert main(["generate", str(run), *fast, "--out", str(tmp_path / "pictures")]) == 0
    assert main(["generate", str(run), *fast, "--out", str(tmp_path / "images.npz")]) == 0
    of_run = evaluate(run)["digits-frechet"]
    for target in (tmp_path / "pictures", tmp_path / "images.npz"):
        result = evaluate(target, "--data", "digits", "--metrics", "fid,sliced")
        assert result["digits-frechet"] == pytest.approx(of_run, rel=1e-6)
        assert (result["files"]["count"], result["target"]) == (60, target.name)
        assert "step" not in result
    assert len(rows(run)) == 1, "the evaluation of a folder went into the run"


def grey_folder(folder, count):
    """A folder of pictures, one of them torn."""
    folder.mkdir(parents=True)
    for number, picture in enumerate(digits("test")[:count]):
        Image.fromarray(picture[0].numpy()).save(folder / f"{number:02d}.png")
    (folder / "torn.png").write_bytes((folder / "07.png").read_bytes()[:50])
    return folder


def test_distances_of_dinov2_features(evaluate, tmp_path, capsys):
    torch.manual_seed(0)
    network = DINOv2(64, 1, grid=3)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    np.save(tmp_path / "noise.npy", torch.randint(0, 256, (30, 3, 8, 8)).byte().numpy())
    real = ("--data", "digits", "--split", "test", "--features", "dinov2")
    result = evaluate(tmp_path / "noise.npy", *real, "--weights", tmp_path / "weights.pth")
    assert result["fd_dinov2"] > 0
    assert "fid" not in result
    assert (result["network"][:12], result["preprocessing"]) == ("dinov2-64x1-", "dinov2")
    assert evaluate(tmp_path / "noise.npy", *real) is None
    assert "FD-DINOv2 needs --weights" in capsys.readouterr().err


def test_damaged_pictures_stop_it_unless_they_may_be_skipped(evaluate, tmp_path, capsys):
    folder = grey_folder(tmp_path / "pictures", 40)
    assert evaluate(folder, "--data", "digits") is None
    assert "torn.png" in capsys.readouterr().err
    result = evaluate(folder, "--data", "digits", "--skip-corrupt")
    assert "left out 1 of 41 pictures" in capsys.readouterr().err
    assert (result["images"], result["files"]["count"]) == (40, 40)


@pytest.fixture
def digits_network(monkeypatch):
    """The small classifier for all grey 8 x 8 images: Inception's weights need not be here."""
    from noisewise.metrics import distances

    def chosen(source, device, *settings):
        return distances.Network(*distances.digits_features.load_digits_classifier(device), "digits", "digits-frechet", 32)

    monkeypatch.setattr(distances, "choose_network", chosen)


@pytest.mark.usefixtures("digits_network")
def test_damaged_real_pictures_are_skipped_too(run, evaluate, tmp_path, capsys):
    grey_folder(tmp_path / "imgs", 40)
    real = ("--data", f"folder:{tmp_path / 'imgs'}", "--data-options", '{"channels": 1}')
    assert evaluate(run, *real) is None
    assert "torn.png" in capsys.readouterr().err
    result = evaluate(run, *real, "--skip-corrupt")
    assert "left out 1 of 41 pictures" in capsys.readouterr().err
    assert (result["images"], result["real_images"]) == (60, 40)
    assert evaluate(run, "--data", "digits", "--skip-corrupt")["real_images"] == 1500  # nothing to skip


@pytest.mark.usefixtures("digits_network")
def test_damaged_pictures_of_the_run_s_own_data_are_skipped_too(evaluate, tmp_path, capsys):
    data = tmp_path / "data"
    torn = [grey_folder(data / split, 40) / "torn.png" for split in ("train", "test")]
    contents = [file.read_bytes() for file in torn]
    for file in torn:
        file.unlink()
    settings = ["--data.source", "folder", "--data.path", str(data), "--data.options", "{channels: 1}"]
    options = ["--config", str(trained_once() / "config.yaml"), *settings, "--out", str(tmp_path / "other"), "--steps", "2"]
    assert main(["train", *options]) == 0
    for file, content in zip(torn, contents, strict=True):
        file.write_bytes(content)
    assert evaluate(tmp_path / "other") is None
    assert "torn.png" in capsys.readouterr().err
    result = evaluate(tmp_path / "other", "--skip-corrupt")
    assert (result["real_images"], result["heldout"]["images"]) == (40, 20)


def test_training_goes_on_after_an_evaluation_and_keeps_its_rows(run, evaluate):
    evaluate(run)
    evaluate(run, "--step", 6, "--metrics", "none")
    before = rows(run)
    assert main(["train", "--resume", "--out", str(run), "--steps", "18"]) == 0
    assert rows(run) == before
    assert load_trained(run).step == 18
    assert evaluate(run)["step"] == 18
    assert [row["step"] for row in rows(run)] == [12, 6, 18]


@pytest.mark.parametrize("process", ["vp", "ve", "edm", "flow"])
def test_every_process_can_be_evaluated(tmp_path, evaluate, process):
    run = copy_of_run(tmp_path, process=process)
    result = evaluate(run, "--solver", "euler:steps=3", "--vlb", 2)
    assert all(np.isfinite([result["digits-frechet"], result["heldout"]["loss"], result["vlb"]["bits_per_dimension"]]))
    assert len(result["vlb"]["by_level"]) == 1000


def test_a_model_of_classes_is_measured_but_has_no_bits_per_dimension(tmp_path, evaluate, capsys):
    run = copy_of_run(tmp_path, conditional=True)
    assert evaluate(run, "--guidance", 1.5)["images"] == 60
    assert evaluate(run, "--vlb", 2) is None
    assert "models without classes" in capsys.readouterr().err


def test_no_more_held_out_losses_are_foretold_than_there_are_images(run, evaluate, monkeypatch):
    said = []
    for name, value in (("forward_seconds", 1.0), ("feature_seconds", 0.0)):
        monkeypatch.setattr(f"noisewise.commands.evaluate.{name}", lambda *_, value=value: value)
    monkeypatch.setattr("noisewise.commands.evaluate.about", lambda seconds: str(said.append(seconds)))
    held_out = len(open_data("digits", split="test"))
    found = evaluate(run, "--heldout", 100_000, "--levels", 2)
    assert found["heldout"]["images"] == held_out
    assert 2.0 * held_out in said


def test_errors_say_what_to_do(run, evaluate, tmp_path, capsys):
    folder = tmp_path / "pictures"
    folder.mkdir()
    Image.new("RGB", (9, 9)).save(folder / "0.png")
    Image.new("RGB", (9, 9)).save(folder / "1.png")
    np.savez(tmp_path / "floats.npz", images=np.zeros((4, 3, 8, 8), np.float32))
    comparison = tmp_path / "comparison"
    comparison.mkdir()
    (comparison / "comparison.json").touch()
    cases = {
        "unknown metric 'is': choose from fid": (run, "--metrics", "fid,is"),
        "save them as uint8": (tmp_path / "floats.npz", "--data", "digits"),
        "--count must be >= 2": (run, "--count", 1),
        "does not exist: give a run": (tmp_path / "none", "--data", "digits"),
        "name the real images to compare with": (folder,),
        "holds a comparison, so give one of its runs": (comparison, "--data", "digits"),
        "write SOURCE:PATH with a source of": (folder, "--data", "cifar"),
        "the images are (1, 9, 9) and the real ones (1, 8, 8)": (folder, "--data", "digits"),
        "is no run with a model": (folder, "--data", "digits", "--metrics", "none"),
        "only the distances of its images": (folder, "--data", "digits", "--vlb", 10),
        "no checkpoint of step 7": (run, "--step", 7),
        "--count is for images that a run generates: of pictures all are": (folder, "--data", "digits", "--count", 2),
        "--step is for images that a run generates": (folder, "--data", "digits", "--step", 2),
        "--feature-batch must be >= 1, got 0": (run, "--feature-batch", 0),
        "--heldout must be >= 0, got -5": (run, "--heldout", -5),
        "--vlb must be >= 0, got -1": (run, "--vlb", -1),
        "--data-options are settings of --data": (run, "--data-options", '{"size": 3}'),
        "nothing was measured": (run, "--metrics", "none", "--heldout", 0),
        "there is no folder": (run, "--json", tmp_path / "nowhere" / "x.json"),
        "no option 'sizes'": (run, "--data", "digits", "--data-options", '{"sizes": 3}'),
    }
    for message, arguments in cases.items():
        assert evaluate(*arguments) is None, message
        assert message in capsys.readouterr().err
    assert rows(run) == []


@pytest.mark.usefixtures("digits_network")
def test_what_cannot_be_measured_is_refused_before_any_work(run, evaluate, tmp_path, capsys, monkeypatch):
    from noisewise.commands import evaluate as evaluate_command
    from noisewise.metrics import distances

    def work(*args, **settings):
        raise RuntimeError("work was done first")

    for place, name in ((evaluate_command, "predictions"), (distances, "real_statistics"), (evaluate_command, "make_set")):
        monkeypatch.setattr(place, name, work)
    np.save(tmp_path / "images.npy", digits("test")[:33].numpy())
    np.save(tmp_path / "five.npy", digits("test")[:5].numpy())
    np.save(tmp_path / "one.npy", digits("test")[:1].numpy())
    np.save(tmp_path / "floats.npy", np.zeros((50, 7)))
    cases = {
        "as the network has 32 features, got 33": (run, "--metrics", "fid,infinity", "--count", 33),
        "infinity needs at least 34 images": (tmp_path / "images.npy", "--data", "digits", "--metrics", "infinity"),
        "needs at least 4 images of either kind, got 3 and 1500": (run, "--count", 3, "--metrics", "precision_recall"),
        "coverage needs at least 6 images": (tmp_path / "five.npy", "--data", "digits", "--metrics", "density_coverage"),
        "fid needs at least 2 images of either kind, got 60 and 1 real": (run, "--data", f"array:{tmp_path / 'one.npy'}"),
        "unknown solver": (run, "--solver", "dim:steps=3"),
        "holds no images": (run, "--data", f"array:{tmp_path / 'floats.npy'}"),
    }
    for message, arguments in cases.items():
        assert evaluate(*arguments) is None, message
        assert message in capsys.readouterr().err
    assert evaluate(run, "--data", "digits", "--count", 34, "--metrics", "infinity") is None  # which is enough
    assert "work was done first" in capsys.readouterr().err


def test_a_result_that_cannot_be_written_is_in_the_run_all_the_same(run, evaluate, capsys):
    assert evaluate(run, "--metrics", "none", "--json", "/proc/x.json") is None
    assert "--json /proc/x.json cannot be written: " in capsys.readouterr().err
    assert len(rows(run)) == 1


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(run, evaluate, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    result = evaluate(run, "--cache", tmp_path / "file" / "cache")
    assert result["digits-frechet"] == evaluate(run)["digits-frechet"]
    assert "could not be kept for the next time" in capsys.readouterr().err


def test_a_model_of_classes_needs_labels_of_held_out_data(tmp_path, evaluate, capsys):
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "test"):
        np.save(data / f"{split}.npy", digits(split)[:50].numpy())
    np.save(data / "train_labels.npy", np.arange(50) % 3)
    settings = ["--data.source=array", f"--data.path={data}", "--model.conditional=true", f"--out={tmp_path / 'other'}"]
    assert main(["train", "--config", str(trained_once() / "config.yaml"), *settings, "--steps", "2"]) == 0
    for labels, message in ((None, "have no labels"), (np.arange(50) % 10, "have 10 classes, but the model knows 3")):
        if labels is not None:
            np.save(data / "test_labels.npy", labels)
        capsys.readouterr()
        assert "heldout" not in evaluate(tmp_path / "other", "--data", "digits")
        assert message in capsys.readouterr().out


def test_held_out_data_that_are_not_there_are_told_and_only_a_wish_for_nothing_else_fails(tmp_path, evaluate, capsys):
    np.save(tmp_path / "train.npy", digits()[:50].numpy())
    settings = ["--data.source", "array", "--data.path", str(tmp_path / "train.npy"), "--out", str(tmp_path / "other")]
    options = ["--config", str(trained_once() / "config.yaml"), *settings, "--steps", "2"]
    assert main(["train", *options]) == 0
    capsys.readouterr()
    result = evaluate(tmp_path / "other", "--data", "digits")
    assert "heldout" not in result
    assert "no held-out loss" in capsys.readouterr().out
    for wish in (["--data", "digits", "--vlb", 2], ["--metrics", "none", "--heldout", 4]):
        assert evaluate(tmp_path / "other", *wish) is None
        assert "no split 'test'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "levels", "kept"),
    [
        ("mlperf", "mlperf", "mlperf"),
        ("log_snr(4)", "log_snr(4)", "log_snr(4)"),
        ("quantiles(4)", 4, 4),
        ("4", 4, 4),
        ("0.1,0.5", [0.1, 0.5], "0.1,0.5"),
    ],
)
def test_levels_are_those_of_the_library(run, evaluate, words, levels, kept, capsys):
    result = evaluate(run, "--metrics", "none", "--levels", words)["heldout"]
    trained, source = load_trained(run), open_data("digits", split="test")
    expected = held_out_losses(trained.call, trained.objective, source, levels=levels, images=20)
    assert (result["levels"], result["u_by_level"]) == (kept, expected.u.tolist())
    assert result["loss_by_level"] == pytest.approx(expected.loss.tolist(), rel=1e-5)
    assert ("vlb_weighted" in result) == expected.even
    assert (expected.lines()[-1] in capsys.readouterr().out) == (not expected.even)


def test_uneven_levels_leave_the_kept_optimal_loss_alone_and_have_a_name_of_their_own(run, evaluate):
    even = evaluate(run, "--metrics", "none", "--optimal")
    kept = (run / FILE).read_text()
    result = evaluate(run, "--metrics", "none", "--optimal", "--levels", "mlperf")
    assert (run / FILE).read_text() == kept
    u = torch.tensor(result["heldout"]["u_by_level"], dtype=torch.float64)
    expected = optimal_loss(load_trained(run).objective, open_data("digits"), u)
    assert result["heldout"]["optimal_by_level"] == pytest.approx(expected.loss.tolist(), rel=1e-9)
    assert measures(even)["held-out loss"] == even["heldout"]["loss"]
    assert measures(result)["held-out loss at mlperf"] == result["heldout"]["loss"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("0", "levels must be >= 1, got 0"),
        ("mlperv", "unknown levels 'mlperv': use mlperf"),
        ("log_snr(0)", "levels must be >= 1, got 0"),
        ("0.5,0.1", "levels must be rising numbers u in [0, 1]"),
        ("0.5,nan", "levels must be rising numbers u in [0, 1]"),
        ("2.5", "levels must be rising numbers u in [0, 1]"),
        ("0.1,,0.5", "unknown levels '0.1,,0.5'"),
    ],
)
def test_unknown_levels_are_told_before_any_work(run, evaluate, words, message, capsys):
    assert evaluate(run, "--levels", words) is None
    said = capsys.readouterr()
    assert f"--levels {words}: {message}" in " ".join(said.err.split())
    assert not (run / "generated").exists()


def test_the_optimal_loss_stands_beside_the_held_out_loss(run, evaluate, capsys):
    result = evaluate(run, "--metrics", "none", "--optimal")["heldout"]
    trained = load_trained(run)
    expected = optimal_loss(trained.objective, open_data("digits"), 5)
    assert result["optimal_by_level"] == pytest.approx(expected.loss.tolist(), rel=1e-9)
    assert result["memorised_by_level"] == expected.memorised.tolist()
    assert result["reducible"] == pytest.approx(result["loss"] - float(expected.loss.mean()))
    assert "reducible" in capsys.readouterr().out
    assert torch.equal(load_optimal_loss(run / FILE, trained.objective).memorised, expected.memorised)
    assert "reducible" not in evaluate(run, "--metrics", "none")["heldout"]
    assert evaluate(run, "--optimal", "--heldout", 0) is None
    assert "--heldout 0" in capsys.readouterr().err
