"""What analyses look at: presets trained on the spot, and the checkpoints of finished runs; and the command itself."""

import argparse
import csv

import pytest

from noisewise.analysis.moments_of_training import add_subject, chosen_config, moments, opened
from noisewise.commands.cli import main
from noisewise.training import checkpoint
from noisewise.training.options import load_preset
from tests.analysis import asking
from tests.training.tiny import differing, tensors

OWN = [*asking.OWN, "--precision", "fp32"]


def asked(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_subject(parser)
    return parser.parse_args(arguments)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "one"
    every = ["--steps", "6", "--checkpoint.every", "2", "--checkpoint.keep", "9", "--log.samples_every", "0"]
    assert main(["train", "--preset", "digits", "--out", str(folder), *OWN, *every, "--log.trackers", "[]"]) == 0
    return folder


def test_a_preset_is_looked_at_at_the_start_and_at_even_shares_of_its_budget():
    trainers = moments(asked("--preset", "digits", "--budget", "9it", "--points", "3"), OWN, print)
    assert [trainer.step for trainer in trainers] == [0, 3, 6, 9]


def test_settings_that_follow_change_the_preset():
    config = chosen_config(asked("--preset", "digits"), [*OWN, "--seed", "5"])
    assert (config.seed, config.batch, config.model.name) == (5, 16, "tests.training.tiny:Own")
    assert (config.log.trackers, config.log.samples_every) == ([], 0)


def test_a_run_is_looked_at_in_each_of_its_checkpoints(finished_run):
    steps = []
    for trainer in moments(asked("--run", str(finished_run)), [], print):
        steps.append(trainer.step)
        saved = checkpoint.load(finished_run / "checkpoints" / checkpoint.name_of(trainer.step))
        flat = {f"{part}/{name}": value for part, values in saved.tensors.items() for name, value in values.items()}
        assert not differing(tensors(trainer), flat)
    assert steps == [2, 4, 6]


def test_a_run_and_the_same_training_on_the_spot_meet(finished_run):
    *_, last = moments(asked("--run", str(finished_run)), [], print)
    found = tensors(last, "model")
    *_, trained = moments(asked("--preset", "digits", "--budget", "6it", "--points", "1"), OWN, print)
    assert not differing(found, tensors(trained, "model"))


def test_few_checkpoints_are_told_of(finished_run, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text((finished_run / "config.yaml").read_text())
    name = checkpoint.name_of(6)
    (tmp_path / "checkpoints" / name).symlink_to(finished_run / "checkpoints" / name)
    told = []
    assert [trainer.step for trainer in moments(asked("--run", str(tmp_path)), [], told.append)] == [6]
    assert "has kept 1 checkpoint; train with --checkpoint.keep_every" in told[0]


def test_a_run_without_checkpoints_says_so(finished_run, tmp_path):
    (tmp_path / "config.yaml").write_text((finished_run / "config.yaml").read_text())
    with pytest.raises(FileNotFoundError, match="no checkpoint yet"):
        next(moments(asked("--run", str(tmp_path)), [], print))


def test_an_opened_trainer_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with opened(load_preset("digits", "--device=cpu")) as trainer:
        trainer.training_step()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="closed"):
        trainer.training_step()


SMALL = {
    "gradients": ["--levels", "3", "--rows", "4"],
    "interdependence": ["--levels", "4", "--images", "2", "--strata", "2", "--steps", "1"],
    "predictor": ["--levels", "4", "--images", "2", "--steps", "8", "--queue", "3", "--sizes", "1,2", "--credit", "5"],
}


@pytest.mark.parametrize("name", SMALL)
def test_the_command_writes_pictures_and_data_of_a_run(name, finished_run, tmp_path, capsys):
    assert main(["analyze", name, str(finished_run), "--out", str(tmp_path), "--formats", "png,pdf", *SMALL[name]]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{name}.{kind}" for kind in ("csv", "pdf", "png"))
    with (tmp_path / f"{name}.csv").open() as file:
        assert {int(row["step"]) for row in csv.DictReader(file)} == {2, 4, 6}
    said = capsys.readouterr()
    assert "Cost: " in said.out
    assert str(tmp_path / f"{name}.csv") in said.out
    assert "step 4: looked at" in said.err
