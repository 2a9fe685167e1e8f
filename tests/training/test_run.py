"""A run in its folder: samples and trackers that change nothing, errors that say what to do, all kinds of data."""

import json
import shutil
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from noisewise import distributed
from noisewise.commands.cli import main
from noisewise.data import Synthetic
from noisewise.generation.run_samples import draw_samples
from noisewise.models import build_model
from noisewise.training import checkpoint
from noisewise.training.components import usual_network, usual_on_cpu, with_network
from noisewise.training.config import CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig
from noisewise.training.display import Progress
from noisewise.training.guard import Diverged
from noisewise.training.options import as_yaml, load_config, load_preset, parse_fitting
from noisewise.training.run import Run, default_folder, dry_run, train
from tests.training.tiny import DIT, differing, own, tiny


class Heard(Progress):
    """Remembers what the user would be told."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def tell(self, message: str) -> None:
        self.messages.append(message)


def logged(config, **changes):
    return replace(config, log=replace(config.log, **changes))


def rows_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("seconds", "steps_per_second")} for row in rows]


def distance(one, other):
    """How far apart the weights are."""
    return sum(float((other[name] - value).square().sum()) for name, value in one.items() if name.startswith("model/")) ** 0.5


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def final(folder, step=12):
    parts = checkpoint.load(folder / "checkpoints" / checkpoint.name_of(step)).tensors
    return {f"{part}/{name}": value for part, values in parts.items() for name, value in values.items()}


@pytest.fixture
def plain(tmp_path):
    """A finished run."""
    config = tiny(out=str(tmp_path / "plain"), sampler="adaptive:warmup=2,every=2")
    return config, train(config)


def test_a_run_leaves_all_that_it_should(plain):
    _, folder = plain
    assert folder.name == "plain"
    assert [row["step"] for row in rows_of(folder)] == [4, 8, 12]
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["step-00000012"]
    assert (folder / "config.yaml").is_file()
    assert json.loads((folder / "environment.jsonl").read_text())["torch"] == torch.__version__
    assert not (folder / "samples").exists()


def test_pictures_and_trackers_do_not_change_training(plain, tmp_path):
    config, folder = plain
    model = replace(config, out=str(tmp_path / "other"))
    other = train(logged(model, samples_every=3, trackers=["tensorboard"]), draw=draw_samples)
    assert differing(final(folder), final(other)) == []
    assert rows_of(folder) == rows_of(other)
    pictures = sorted(path.name for path in (other / "samples").iterdir())
    assert pictures == [f"step-{step:08d}.png" for step in (3, 6, 9, 12)]
    assert Image.open(other / "samples" / pictures[0]).size == (2 * 36 + 4, 2 * 36 + 4)
    assert list((other / "trackers").rglob("events.out.tfevents.*"))
    assert {path.name for path in other.iterdir()} - {path.name for path in folder.iterdir()} == {"samples", "trackers"}


def test_pictures_with_dropout_do_not_change_training(tmp_path):
    config = tiny(model=own("Own", dropout=0.5))
    configs = [logged(replace(config, out=str(tmp_path / str(every))), samples_every=every) for every in (0, 5)]
    folders = [train(each, draw=draw_samples) for each in configs]
    assert differing(*map(final, folders)) == []
    assert sorted(path.name for path in (folders[1] / "samples").iterdir())[-1] == "step-00000012.png"


@pytest.mark.parametrize(
    ("process", "prediction", "said"),
    [
        (
            "flow:time_scale=1000",
            "eps",
            "the model predicts eps; usual for the process flow:time_scale=1000 is --prediction flow",
        ),
        ("edm", "eps", "the model predicts eps; usual for the process edm is --prediction edm"),
        ("flow", "flow", None),
        ("flow", "x0", None),
        ("cosine", "eps", None),
        ("cosine", "v", None),
    ],
)
def test_a_prediction_of_noise_where_it_is_unusual_is_told(process, prediction, said, tmp_path):
    heard = Heard()
    Run(tiny(out=str(tmp_path / "run"), process=process, prediction=prediction), progress=heard).close()
    assert heard.messages == ([said] if said else [])


def test_no_samples_are_no_error(tmp_path):
    folder = train(logged(tiny(out=str(tmp_path / "run")), samples_every=4, samples=0), draw=draw_samples)
    assert not (folder / "samples").exists()


def test_resuming_a_finished_run_does_nothing_and_says_so(plain):
    config, folder = plain
    before = {path: path.stat().st_mtime_ns for path in (folder / "checkpoints").rglob("*")}
    rows, heard = (folder / "metrics.jsonl").read_text(), Heard()
    train(config, resume=True, progress=heard)
    assert {path: path.stat().st_mtime_ns for path in (folder / "checkpoints").rglob("*")} == before
    assert (folder / "metrics.jsonl").read_text() == rows
    assert any("at step 12: nothing to do" in message for message in heard.messages), heard.messages


def test_a_run_whose_seconds_ran_out_says_so(tmp_path):
    config = tiny(out=str(tmp_path / "run"), seconds=1e-6)
    train(config)
    heard = Heard()
    train(replace(config, steps=99), resume=True, progress=heard)
    assert any(message.endswith("nothing to do; more --seconds would go on") for message in heard.messages), heard.messages


def test_resuming_that_fails_leaves_the_settings_as_they_were(tmp_path):
    np.save(tmp_path / "data.npy", np.zeros((32, 1, 8, 8), np.uint8))
    config = tiny(data=DataConfig(source="array", path=str(tmp_path / "data.npy")), out=str(tmp_path / "run"))
    folder = train(config)
    before = (folder / "config.yaml").read_text()
    wrong = replace(config, steps=20, data=replace(config.data, path=str(tmp_path / "nowhere.npy")))
    with pytest.raises(FileNotFoundError, match=r"nowhere\.npy"):
        train(wrong, resume=True)
    assert (folder / "config.yaml").read_text() == before
    train(replace(config, steps=10), resume=True)  # fewer than it has made: nothing to do
    assert (folder / "config.yaml").read_text() == before
    train(replace(config, steps=14), resume=True)
    assert load_config(folder / "config.yaml").steps == 14


def test_a_run_is_not_resumed_with_other_data_unnoticed(tmp_path):
    values = np.random.default_rng(0).integers(0, 256, (32, 1, 8, 8), np.uint8)
    for name, array in {"data": values, "more": np.concatenate([values, values]), "other": 255 - values}.items():
        np.save(tmp_path / f"{name}.npy", array)
    shutil.copy(tmp_path / "data.npy", tmp_path / "moved.npy")
    paths = {
        name: DataConfig(source="array", path=str(tmp_path / f"{name}.npy")) for name in ("data", "more", "other", "moved")
    }
    config = tiny(data=paths["data"], out=str(tmp_path / "run"))
    train(config)
    with pytest.raises(checkpoint.CheckpointError, match=r"not those that it was trained on \(samples 32 -> 64"):
        train(replace(config, steps=14, data=paths["more"]), resume=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(replace(config, steps=14, data=paths["moved"]), resume=True)
    with pytest.warns(UserWarning, match=r"or are stored in another way \(fingerprint \w+ -> \w+\)"):
        train(replace(config, steps=16, data=paths["other"]), resume=True)


def test_a_seed_of_64_bits_trains_and_is_resumed(tmp_path):
    config = tiny(seed=2**64 - 5, out=str(tmp_path / "run"))
    folder = train(replace(config, steps=8))
    train(config, resume=True)
    straight = train(replace(config, out=str(tmp_path / "straight")))
    assert differing(final(folder), final(straight)) == []


def test_a_finished_run_goes_on_with_more_steps(plain, tmp_path):
    config, folder = plain
    train(replace(config, steps=20), resume=True)
    straight = train(replace(config, steps=20, out=str(tmp_path / "straight")))
    assert differing(final(folder, 20), final(straight, 20)) == []
    assert rows_of(folder) == rows_of(straight)


def test_epochs_are_resolved_by_the_data_and_resumed(tmp_path):
    np.save(tmp_path / "data.npy", np.random.default_rng(0).integers(0, 256, (40, 1, 8, 8), np.uint8))
    data = DataConfig(source="array", path=str(tmp_path / "data.npy"))
    in_steps = train(tiny(data=data, steps=15, out=str(tmp_path / "steps")))
    config = tiny(data=data, epochs=3.0, out=str(tmp_path / "run"))  # 3 x 40 samples in batches of 16: 7.5 steps
    folder = train(config)
    kept = load_config(folder / "config.yaml")
    assert (kept.epochs, kept.steps) == (3, 8)
    assert rows_of(folder)[-1]["step"] == 8
    heard = Heard()
    train(config, resume=True, progress=heard)
    assert heard.messages == [f"{folder} ended at step 8: nothing to do; more --epochs would go on"]
    heard = Heard()
    train(replace(config, epochs=6.0), resume=True, progress=heard)
    assert heard.messages == [f"resuming {folder} at step 8, with epochs: 3.0 -> 6.0"]
    kept = load_config(folder / "config.yaml")
    assert (kept.epochs, kept.steps) == (6, 15)
    assert differing(final(folder, 15), final(in_steps, 15)) == []


def test_resuming_where_nothing_is_begins(tmp_path):
    heard = Heard()
    folder = train(tiny(out=str(tmp_path / "new")), resume=True, progress=heard)
    assert [row["step"] for row in rows_of(folder)] == [4, 8, 12]
    assert [str(folder) in message for message in heard.messages] == [True]  # a misspelt --out would train for days


def test_a_run_is_resumed_with_a_lower_learning_rate(plain, tmp_path):
    config, folder = plain
    before = shutil.copytree(folder, tmp_path / "before")
    lower = replace(config, steps=16, optimizer=replace(config.optimizer, lr=1e-3, clip=0.5))
    heard = Heard()
    train(lower, resume=True, progress=heard)
    assert any(
        message.endswith("steps: 12 -> 16; optimizer.lr: 0.01 -> 0.001; optimizer.clip: 1.0 -> 0.5")
        for message in heard.messages
    )
    assert load_config(folder / "config.yaml") == lower
    assert [(row["step"], row["lr"]) for row in rows_of(folder)] == [(4, 1e-2), (8, 1e-2), (12, 1e-2), (16, 1e-3)]
    higher = train(replace(config, steps=16, out=str(tmp_path / "higher")))
    assert 0 < distance(final(before), final(folder, 16)) < 0.3 * distance(final(before), final(higher, 16))


def test_a_run_that_goes_on_may_end_with_a_cool_down(plain):
    config, folder = plain
    train(replace(config, steps=16, optimizer=replace(config.optimizer, cooldown=4)), resume=True)
    assert [row["lr"] for row in rows_of(folder)] == pytest.approx([1e-2, 1e-2, 1e-2, 0.25e-2])


def test_a_cool_down_is_resumed_bit_for_bit(tmp_path):
    config = tiny(out=str(tmp_path / "whole"), steps=12)
    config = replace(config, optimizer=replace(config.optimizer, cooldown=8))
    whole = train(config)
    halves = replace(config, out=str(tmp_path / "halves"))
    run = Run(halves)
    for _ in range(6):
        run.trainer.training_step()
    run.save()
    run.close()
    train(halves, resume=True)
    assert distance(final(whole), final(tmp_path / "halves")) == 0


def test_a_cool_down_needs_a_last_step():
    with pytest.raises(ValueError, match=r"optimizer\.cooldown needs a run whose last step is known"):
        tiny(seconds=3.0, optimizer=OptimizerConfig(cooldown=2)).check()


def test_a_rotten_checkpoint_costs_a_run_nothing_but_its_own_steps(tmp_path):
    """At 10 whole, at 14 rotten: resumed at 10, and keeping one, the next save must not remove what is whole."""
    config = tiny(out=str(tmp_path / "run"), steps=14, checkpoint=CheckpointConfig(every=10, keep=2))
    folder = train(config)
    assert names_in(folder / "checkpoints") == ["step-00000010", "step-00000014"]
    victim = folder / "checkpoints" / "step-00000014" / "model.safetensors"
    victim.write_bytes(victim.read_bytes()[:-1])
    heard = Heard()
    config = replace(config, steps=20, checkpoint=CheckpointConfig(every=12, keep=1))
    run = Run(config, resume=True, progress=heard)
    assert run.trainer.step == 10
    assert any("step-00000014: model.safetensors is not what was written" in message for message in heard.messages)
    assert names_in(folder / "checkpoints") == ["step-00000010", "unusable-step-00000014"]
    for step in run.advance():
        run.settle(wait=True)
        if step == 12:  # no step was made from it yet
            assert names_in(folder / "checkpoints") == ["step-00000010", "step-00000012", "unusable-step-00000014"]
        if step == 13:
            assert names_in(folder / "checkpoints") == ["step-00000012", "unusable-step-00000014"]
            assert checkpoint.newest_name(folder / "checkpoints") == "step-00000012"
    run.close()
    assert names_in(folder / "checkpoints") == ["step-00000020", "unusable-step-00000014"]
    straight = train(replace(config, out=str(tmp_path / "straight")))
    assert differing(final(folder, 20), final(straight, 20)) == []


def test_a_checkpoint_that_does_not_fit_is_refused_and_left_where_it_is(plain):
    config, folder = plain
    found = checkpoint.load(folder / "checkpoints" / "step-00000012")
    del found.tensors["guard"]
    checkpoint.save(folder / "checkpoints", 13, found.tensors, found.state)
    with pytest.raises(checkpoint.CheckpointError, match="step-00000013 does not fit this run"):
        train(replace(config, steps=20), resume=True)
    assert names_in(folder / "checkpoints") == ["step-00000012", "step-00000013"]


def test_a_start_that_fails_may_be_repeated(tmp_path):
    """The first try names data that are not there: its folder must not stand in the way of the second."""
    config = tiny(out=str(tmp_path / "run"), data=DataConfig(source="array", path=str(tmp_path / "missing.npy")))
    with pytest.raises(FileNotFoundError, match=r"missing\.npy"):
        train(config)
    np.save(tmp_path / "missing.npy", np.zeros((32, 1, 8, 8), np.uint8))
    assert rows_of(train(config))[-1]["step"] == 12


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_start_that_fails_in_its_first_step_may_be_repeated(error, tmp_path, monkeypatch):
    """Out of memory, say: the remedy is another setting, which a run that was resumed could not take."""
    config = tiny(out=str(tmp_path / "run"))
    with monkeypatch.context() as broken:
        broken.setattr("noisewise.training.step.Step.backward", raising(error))
        with pytest.raises(error):
            train(config)
    folder = train(replace(config, batch=8))
    assert rows_of(folder)[-1]["step"] == 12


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints"])
def test_what_a_run_has_left_is_not_taken_over_by_another(plain, tmp_path, left):
    """Its rows would be gone, and its weights would pass for those of the new one."""
    config, folder = plain
    kept = tmp_path / "kept"
    kept.mkdir()
    (shutil.copytree if left == "checkpoints" else shutil.copy)(folder / left, kept / left)
    with pytest.raises(FileExistsError, match=r"holds what a run has left, but no config\.yaml: give another --out"):
        train(replace(config, seed=1, out=str(kept)))
    assert names_in(kept) == [left]


def test_what_cannot_be_saved_is_known_before_the_first_step(tmp_path):
    config = tiny(out=str(tmp_path / "run"), model=own("Remembering"))
    with pytest.raises(TypeError, match="_extra_state of the Remembering is dict, and a checkpoint holds tensors alone"):
        train(config)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["aim", "tensorbored"])
def test_a_tracker_that_is_not_installed_or_not_known_is_named_before_anything_is_made(name, tmp_path):
    config = logged(tiny(out=str(tmp_path / "run")), trackers=[name])
    with pytest.raises(ValueError, match=name):
        train(config)
    assert not (tmp_path / "run").exists()


BEYOND = 30  # steps: the bad ones, and some after them


@pytest.fixture(scope="module")
def never_blown_up(tmp_path_factory):
    return train(tiny(out=str(tmp_path_factory.mktemp("straight") / "run"), steps=BEYOND))


def blown_up(config, at, **checkpoints):
    """A run that goes well up to a step, and then takes one that ruins the weights; its settings, and what it said."""
    config = replace(config, steps=BEYOND, max_bad_steps=8, checkpoint=CheckpointConfig(**checkpoints))
    run = Run(config)
    walk = run.advance()
    while run.trainer.step < at:
        next(walk)
    config.optimizer.lr = 1e25
    with pytest.raises(Diverged) as raised:
        list(walk)
    run.close()
    config.optimizer.lr = 1e-2
    return config, str(raised.value)


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize(("at", "every", "left"), [(12, 5, 10), (14, 5, 10), (15, 5, 15), (9, 1, 9), (11, 4, 8)])
def test_a_blown_up_run_goes_on_from_before(at, every, left, keep, tmp_path, never_blown_up):
    """The step after `at` ruins the weights, those after it fail; what was saved since then is out of the way."""
    config, said = blown_up(tiny(out=str(tmp_path / "run")), at, every=every, keep=keep)
    assert f"step-{left:08d}" in said
    folder = tmp_path / "run" / "checkpoints"
    assert checkpoint.good_steps_in(folder)[-1] == left
    assert all(step <= left for step in checkpoint.steps_in(folder))
    run = Run(config, resume=True)
    assert run.trainer.step == left
    list(run.advance())
    run.close()
    assert differing(final(tmp_path / "run", BEYOND), final(never_blown_up, BEYOND)) == []


def test_the_only_checkpoint_stays_even_if_no_step_was_made_from_it(tmp_path):
    _, said = blown_up(tiny(out=str(tmp_path / "run")), 0, every=1, keep=1)
    assert "step-00000001" in said
    assert checkpoint.steps_in(tmp_path / "run" / "checkpoints") == [1]


def test_a_run_that_was_never_good_says_so(tmp_path):
    _, said = blown_up(tiny(out=str(tmp_path / "run"), model=own("Poisoned", low=0, high=1000)), 0, every=2, keep=1)
    assert "no checkpoint" in said
    assert not checkpoint.steps_in(tmp_path / "run" / "checkpoints")


def test_what_is_saved_while_steps_fail_is_marked_and_the_last_to_be_taken(tmp_path):
    """A run that is asked to stop, or ends, in a bad stretch: its checkpoint takes the place of none."""
    config = tiny(out=str(tmp_path / "run"), model=own("Poisoned"), steps=14, checkpoint=CheckpointConfig(every=5, keep=1))
    run, folder = Run(config), tmp_path / "run" / "checkpoints"
    for step in run.advance():
        run.trainer.model.high = 1000 if step >= 12 else 0
    run.close()
    assert (checkpoint.steps_in(folder), checkpoint.good_steps_in(folder)) == ([10, 14], [10])
    heard = Heard()
    run = Run(config, resume=True, progress=heard)
    assert run.trainer.step == 10
    assert any("step-00000014" in message for message in heard.messages)
    list(run.advance())
    run.close()
    assert checkpoint.good_steps_in(folder) == [14]
    straight = train(replace(config, out=str(tmp_path / "straight")))
    assert differing(final(tmp_path / "run", 14), final(straight, 14)) == []


def test_a_single_bad_step_long_ago_marks_nothing(tmp_path):
    config = tiny(out=str(tmp_path / "run"), model=own("Poisoned"), checkpoint=CheckpointConfig(every=5, keep=9))
    run = Run(config)
    for step in run.advance():
        run.trainer.model.high = 1000 if step in (2, 6) else 0
    run.close()
    assert checkpoint.good_steps_in(tmp_path / "run" / "checkpoints") == [5, 10, 12]
    assert int(run.trainer.guard.skipped) == 2


def test_a_run_goes_on_from_the_checkpoint_that_it_is_told(plain):
    config, folder = plain
    train(replace(config, steps=20, checkpoint=CheckpointConfig(every=4, keep=9)), resume=True)
    expected = final(folder, 20)
    run = Run(replace(config, steps=20), resume=True, step=16)
    assert run.trainer.step == 16
    assert checkpoint.steps_in(folder / "checkpoints")[-1] == 16
    list(run.advance())
    run.close()
    assert differing(final(folder, 20), expected) == []
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 17; it has"):
        Run(replace(config, steps=20), resume=True, step=17)


def test_the_default_folder_tells_specs_apart():
    specs = ["mode:scale=0.5", "mode:scale=-0.5", "adaptive", "adaptive+minsnr", "adaptive:target=(minsnr)", "uniform"]
    names = {default_folder(tiny(sampler=spec)).name for spec in specs}
    assert len(names) == len(specs)
    assert all("/" not in name and " " not in name for name in names)


# Data and models --------------------------------------------------------------------------------------------------------


def pictures(folder):
    for i in range(24):
        values = np.random.default_rng(i).integers(0, 256, (8, 8), np.uint8)
        (folder / str(i % 2)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(values).save(folder / str(i % 2) / f"{i}.png")
    return DataConfig(source="folder", path=str(folder), options={"size": 8}, flip=True)


def array(folder):
    folder.mkdir()
    np.save(folder / "train.npy", Synthetic((1, 8, 8), count=24).read(np.arange(24))[0].numpy())
    return DataConfig(source="array", path=str(folder))


def latents(folder):
    folder.mkdir()
    values = np.random.default_rng(0).standard_normal((2, 24, 1, 8, 8)).astype(np.float16)
    np.save(folder / "mean.npy", values[0])
    np.save(folder / "std.npy", np.abs(values[1]))
    index = {"version": 1, "autoencoder": "none", "shape": [1, 8, 8], "count": 24, "classes": 0}
    (folder / "index.json").write_text(json.dumps(index | {"scale": 0.5, "shift": 0.0, "source": "made up"}))
    return DataConfig(source="latents", path=str(folder))


@pytest.mark.parametrize("make", [pictures, array, latents])
def test_data_read_by_workers_train_as_data_read_here(make, tmp_path):
    data = make(tmp_path / "data")
    runs = []
    for workers in (0, 2):
        config = tiny(steps=6, out=str(tmp_path / str(workers)), data=replace(data, workers=workers, resident=False))
        runs.append(final(train(logged(config, samples_every=6), draw=draw_samples), 6))
        drawn = (tmp_path / str(workers) / "samples" / "step-00000006.png").exists()
        assert drawn == (data.source != "latents")
    assert differing(*runs) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataConfig(source="cifar10", path="no/where"), "no/where"),
        (DataConfig(source="folder", path="no/where"), "no/where"),
        (DataConfig(source="latents", path="no/where"), "no/where.*encode"),
        (DataConfig(source="array"), "needs a path"),
        (DataConfig(source="digit"), "did you mean 'digits'"),
        (DataConfig(source="digits", shape=(3, 8, 8)), r"data.shape is \(3, 8, 8\), but the samples of digits are \(1, 8, 8\)"),
        (DataConfig(source="digits", classes=11), "data.classes is 11, but digits has 10"),
    ],
)
def test_data_that_are_not_as_described_are_a_clear_error(data, message, tmp_path):
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        train(tiny(out=str(tmp_path / "run"), data=data))


def test_a_conditional_model_needs_labels(tmp_path):
    np.save(tmp_path / "data.npy", np.zeros((8, 1, 8, 8), np.uint8))
    data = DataConfig(source="array", path=str(tmp_path / "data.npy"))
    with pytest.raises(ValueError, match=r"model.conditional=true, but the data \(.*\) have no labels"):
        train(tiny(out=str(tmp_path / "run"), data=data, model=ModelConfig(name="dit", options=DIT, conditional=True)))


def test_a_dry_run_makes_no_folder_and_needs_no_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = dry_run(tiny(epochs=3, data=DataConfig(source="cifar10", path="no/where", shape=(3, 8, 8), classes=10)))
    assert said["sample_shape"] == [3, 8, 8]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("shape", "on_gpu", "channels", "levels"),
    [
        ((1, 8, 8), False, 16, 2),
        ((3, 32, 32), True, 64, 4),
        ((3, 28, 28), False, 16, 3),
        ((3, 7, 8), False, 16, 1),
        ((4, 64, 48), True, 128, 4),
    ],
)
def test_the_usual_network_can_be_built_for_any_shape(shape, on_gpu, channels, levels):
    options = usual_network(shape, on_gpu)
    assert (options["channels"], len(options["multipliers"])) == (channels, levels)
    with torch.device("meta"):
        build_model("unet", options, shape=shape)


def test_the_usual_networks_are_those_of_the_presets():
    assert usual_network((1, 8, 8), on_gpu=False) == load_preset("digits").model.options
    small = load_preset("cifar10-small").model.options
    assert usual_network((3, 32, 32), on_gpu=True) == {name: value for name, value in small.items() if name != "attention"}


def test_a_run_without_a_network_picks_one_and_keeps_it(tmp_path):
    config = tiny(model=ModelConfig(), steps=2, batch=4, out=str(tmp_path / "run"))
    told = Heard()
    train(config, progress=told)
    assert any("163,985 parameters" in message for message in told.messages)
    stored = load_config(tmp_path / "run" / "config.yaml").model
    assert (stored.name, stored.options) == ("unet", usual_network((1, 8, 8), on_gpu=False))
    train(replace(config, steps=3), resume=True)  # "auto" is what it was
    assert checkpoint.steps_in(tmp_path / "run" / "checkpoints")[-1] == 3


def test_no_network_is_picked_for_what_is_no_picture():
    with pytest.raises(ValueError, match=r"no network is picked for samples of shape \(2,\).*--model.name"):
        with_network(tiny(model=ModelConfig()), (2,))


def test_options_without_a_name_are_those_of_a_unet():
    model = with_network(tiny(model=ModelConfig(options={"channels": 8}))).model
    assert (model.name, model.options) == ("unet", {"channels": 8})


# Defaults for a CPU


def fitting(*arguments):
    """What is parsed for data of 3 x 48 x 64 that are not there, and what was picked."""
    return parse_fitting(["--data.source=folder", "--data.shape=[3, 48, 64]", *arguments], (), usual_on_cpu)


@pytest.mark.parametrize(("shape", "batch"), [((1, 8, 8), 128), ((3, 32, 32), 64), ((3, 48, 64), 16), ((3, 512, 512), 8)])
def test_on_a_cpu_larger_pictures_come_in_smaller_batches(shape, batch, monkeypatch):
    config = Config(data=DataConfig(source="folder", shape=shape))
    assert usual_on_cpu(config)["batch"] == batch
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert usual_on_cpu(config) == {}
    assert usual_on_cpu(replace(config, device="cpu"))["batch"] == batch


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ("--batch=48", "batch", 48),
        ("--batch=128", "batch", 128),  # what it would be on a GPU is a choice too
        ("--steps=100000", "steps", 100_000),
        ("--epochs=3", "steps", 100_000),
        ("--seconds=60", "steps", 100_000),
        ("--accumulation=32", "batch", 128),
    ],
)
def test_what_is_given_holds_on_a_cpu_too(given, name, value, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    usual, picked = fitting()
    assert (usual.batch, usual.steps) == (picked["batch"], picked["steps"]) == (16, 5000)
    for arguments in ([given], ["--config", str(tmp_path / "mine.yaml")]):
        (tmp_path / "mine.yaml").write_text(given.removeprefix("--").replace("=", ": "))
        config, picked = fitting(*arguments)
        assert getattr(config, name) == value
        assert name not in picked


def test_no_preset_and_no_run_that_goes_on_takes_them(tmp_path, monkeypatch):
    from noisewise.commands import train as command

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    begun = []
    monkeypatch.setattr(command, "train", lambda config, **more: begun.append(config) or tmp_path)
    (tmp_path / "config.yaml").write_text(as_yaml(Config(batch=32, steps=7)))
    for words in (["--preset=digits"], [f"--out={tmp_path}", "--resume"], [f"--out={tmp_path / 'new'}", "--resume"]):
        assert main(["train", *words]) == 0
    assert [(config.batch, config.steps) for config in begun] == [(192, 2000), (32, 7), (128, 5000)]


@pytest.mark.parametrize(("seconds", "expected"), [(0.001, [1, 11]), (0.3, [1, 4, 7, 10]), (5.0, list(range(1, 13)))])
def test_processes_ask_one_another_often_enough_to_be_stopped_in_time(seconds, expected, tmp_path, monkeypatch):
    run, asked = Run(tiny(out=str(tmp_path / "run"))), []
    with monkeypatch.context() as two:
        two.setattr(distributed, "world_size", lambda: 2)
        two.setattr(distributed, "largest", lambda number, device: number)
        for run.trainer.step in range(1, 13):
            run.trainer.seconds = run.trainer.step * seconds
            run._plan_agreement(0, 0.0)
            asked += [run.trainer.step] * run._agreeing
    run.close()
    assert asked == expected
