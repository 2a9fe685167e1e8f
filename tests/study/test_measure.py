"""How a run of a comparison is measured: the solvers of its configuration, and images that have to be decoded first."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL

from noisewise.commands.cli import main
from noisewise.data import Synthetic, open_data
from noisewise.data.encoding import encode
from noisewise.generation.images import make_decoder, to_uint8
from noisewise.generation.run_samples import run_samples
from noisewise.generation.solvers import Solver
from noisewise.metrics.digits_features import digits_features
from noisewise.metrics.distances import Network, real_statistics
from noisewise.metrics.frechet import features_distance
from noisewise.study import measure
from noisewise.study.measure import evaluate, said_fewer
from noisewise.study.outcome import read_comparison, read_outcome
from noisewise.study.worker import work
from noisewise.training.config import DataConfig, EvaluationConfig
from noisewise.training.run import Run
from tests.data.small_autoencoder import SMALL
from tests.metrics.sets import digits
from tests.study.fateful import jobs_in
from tests.training.tiny import DIT, tiny

FULL, QUICK = "ddpm:steps=7,variance=fixed_large", "euler:steps=2"


def distance(images):
    return features_distance(digits_features(to_uint8(images)), digits_features(digits()))


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    """A folder of latents of the digits, with both splits."""
    root = tmp_path_factory.mktemp("latents")
    torch.manual_seed(0)
    small = AutoencoderKL(in_channels=1, out_channels=1, latent_channels=4, scaling_factor=0.7, **SMALL)
    small.save_pretrained(root / "autoencoder")
    for split in ("train", "test"):
        encode(open_data("digits", split=split), str(root / "autoencoder"), root / "data" / split)
    return root / "data"


def test_the_quick_solver_is_for_the_way_and_the_other_for_the_headline(tmp_path):
    planned = EvaluationConfig(solver=FULL, quick_solver=QUICK)
    (job,) = jobs_in(tmp_path, shares=(0.5, 1.0), evaluation=planned)
    assert work(replace(job, headline=15)) == "finished"  # fewer than the 20 along the way: not the same images
    *_, last = read_outcome(job.folder).evaluations
    run = Run(job.config, resume=True)
    process = run.trainer.objective.process
    made = {spec: run_samples(run, 20, solver=Solver.parse(spec, process)) for spec in (FULL, QUICK)}
    run.close()
    assert last.distance == pytest.approx(distance(made[QUICK]), rel=1e-4)
    assert last.headline == pytest.approx(distance(made[FULL][:15]), rel=1e-4)
    assert last.headline != pytest.approx(distance(made[QUICK][:15]), rel=1e-2)


def test_features_may_be_a_little_off_along_the_way_but_not_at_the_end(tmp_path, monkeypatch):
    told, compare = [], measure.compare_images
    monkeypatch.setattr(measure, "compare_images", lambda *given, **more: told.append(more["tf32"]) or compare(*given, **more))
    run = Run(tiny(out=str(tmp_path / "run")))
    for share in (0.5, 1.0):
        evaluate(run, share, 20, headline=30)
    run.close()
    assert told == [True, False, False, False]  # both headlines are exact


def test_few_real_images_stand_for_all_along_the_way_and_at_the_end_but_not_for_the_headline(tmp_path, monkeypatch):
    run, told, compare = Run(tiny(out=str(tmp_path / "run"))), [], measure.compare_images
    source = run.trainer.parts.source
    network = replace(measure.choose_network(source, "cpu"), metric="fid")
    monkeypatch.setattr(measure, "_KEPT", {(source.name, source.shape, "cpu"): network})
    monkeypatch.setattr(measure, "CPU_REAL_IMAGES", 100)
    monkeypatch.setattr(
        measure, "compare_images", lambda *given, **more: told.append(given[1].moments.count) or compare(*given, **more)
    )
    evaluate(run, 0.5, 20)
    evaluate(run, 1.0, 20, headline=30)
    run.close()
    assert told == [100, 100, len(source)]


def test_latents_are_decoded_and_measured_against_real_images(latents, tmp_path):
    config = tiny(
        out=str(tmp_path / "run"),
        data=DataConfig(source="latents", path=str(latents)),
        model=replace(tiny().model, options=DIT),
        evaluation=EvaluationConfig(data="digits"),
    )
    run, heard = Run(config), []
    found = evaluate(run, 1.0, 30, headline=40, tell=heard.append)
    decode = make_decoder(run.trainer.parts.latents, "cpu")
    images = decode(run_samples(run, 40))
    assert images.shape == (40, 1, 8, 8)
    assert (found.metric, found.distance) == ("digits-frechet", pytest.approx(distance(images[:30]), rel=1e-4))
    assert found.headline == pytest.approx(distance(images), rel=1e-4)
    assert (run.folder.path / found.picture).is_file()
    run.config = replace(config, evaluation=EvaluationConfig())
    found = evaluate(run, 1.0, 30, tell=heard.append)
    run.close()
    assert (found.metric, found.distance, found.picture) == (None, None, None)
    assert len(heard) == 1
    assert "--data" in heard[0]


def test_latents_are_decoded_a_few_at_a_time(latents, tmp_path, monkeypatch):
    config = tiny(
        out=str(tmp_path / "run"),
        data=DataConfig(source="latents", path=str(latents)),
        model=replace(tiny().model, options=DIT),
        evaluation=EvaluationConfig(data="digits"),
    )
    run, told, decode = Run(config), [], measure.as_images
    samples = run_samples(run, 30)
    monkeypatch.setattr(measure, "DECODED", 8)
    monkeypatch.setattr(measure, "as_images", lambda run, part: told.append(len(part)) or decode(run, part))
    _, found, _ = measure.distance_to_data(run, [samples], print)
    run.close()
    assert told == [8, 8, 8, 6]
    assert found == pytest.approx(distance(make_decoder(run.trainer.parts.latents, "cpu")(samples)), rel=1e-4)


def test_compare_measures_latents_against_the_images_that_data_names(latents, tmp_path, capsys):
    command = [
        *("compare", "--samplers=uniform", "--seeds=1", "--budget=4it", "--evaluate-at=1", "--device=cpu", "--batch=16"),
        *("--precision=fp32", "--data.source=latents", f"--data.path={latents}", "--model.name=dit"),
        *('--model.options={"patch": 4, "width": 16, "depth": 1, "heads": 2}', "--evaluation.quick_solver=ddim:steps=2"),
        *("--evaluation.solver=ddim:steps=3", "--evaluation.quick_images=20", "--evaluation.images=30", "--headline"),
    ]
    assert main([*command, "--data=digits", f"--out={tmp_path / 'out'}"]) == 0
    comparison = read_comparison(tmp_path / "out")
    (outcome,) = comparison.outcomes
    assert (comparison.plan.images, comparison.plan.headline) == (20, 30)
    assert (outcome.final.metric, outcome.final.images, outcome.final.headline_images) == ("digits-frechet", 20, 30)
    assert outcome.config.evaluation.data == "digits"
    for wrong in ("--data=folder:nowhere", f"--data=latents:{latents}", "--evaluation.solver=unheard-of"):
        assert main([*command, wrong, f"--out={tmp_path / 'wrong'}"]) == 1
        assert not (tmp_path / "wrong").exists()
    assert main([*command, "--data-options={size: 8}", f"--out={tmp_path / 'wrong'}"]) == 1
    said = capsys.readouterr().err
    assert "--data-options are settings of --data" in said
    assert "nowhere" in said
    assert "holds no images" in said
    assert "unheard-of" in said


# What is said before measuring begins, and how many images are measured -----------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "about 1 s"), (89, "about 89 s"), (90, "about 2 minutes"), (5400, "about 2 hours")]
)
def test_times_in_words(seconds, said):
    assert measure.about(seconds) == said


def test_a_moment_in_which_others_have_the_machine_is_not_taken_for_its_speed(monkeypatch):
    now, busy = [0.0], iter([0.1] * 4)

    def work():
        now[0] += next(busy, 0.01)

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    assert measure.seconds_of(work) == pytest.approx(0.01)


def test_an_evaluation_takes_as_many_forward_passes_as_it_makes(monkeypatch):
    monkeypatch.setattr(measure, "forward_seconds", lambda *_: 1.0)
    monkeypatch.setattr(measure, "feature_seconds", lambda *_: 100.0)
    source = open_data("digits")
    each, once = measure.evaluation_seconds(None, source, 0, images=10, solver_steps=7)
    assert each == 10 * 7 + measure.LEVELS * measure.HELD_OUT + 10 * 100
    assert once == 0  # the digits' own classifier takes no time


def test_inception_on_a_cpu_is_only_for_images_that_are_no_digits():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    images = Synthetic((3, 32, 32), 0)
    assert measure.needs_inception(images, cpu) == images.image
    assert not measure.needs_inception(images, gpu)
    assert not measure.needs_inception(open_data("digits"), cpu)
    assert not measure.needs_inception(None, cpu)


def test_some_of_the_real_images_are_spread_over_all_and_kept_apart(tmp_path):
    pictures = np.full((30, 8, 8, 1), 100, np.uint8) + np.arange(30, dtype=np.uint8)[:, None, None, None]  # sorted, as by class
    np.save(tmp_path / "train.npy", pictures)
    source = open_data("array", str(tmp_path))
    means = Network(Brightness(), "brightness", "digits", "fid", 1)
    settings = {"cache": tmp_path / "cache", "batch": 2}
    some, everything = (real_statistics(source, means, "cpu", count=count, **settings).moments for count in (4, None))
    assert (some.count, everything.count) == (4, 30)
    assert float(some.mean) == pytest.approx(float(everything.mean), abs=0.02)
    assert real_statistics(source, means, "cpu", count=99, **settings).moments.count == 30


class Brightness(torch.nn.Module):
    def forward(self, x):
        return x.mean((1, 2, 3))[:, None]


def test_no_more_real_images_are_said_to_be_measured_than_there_are():
    assert "250 images and 1,000 real ones, not of 5,000 and all" in said_fewer(250, 5000, 50_000, "--count")
    assert "250 images and the 300 real ones, not of 5,000" in said_fewer(250, 5000, 300, "--count")
