"""What comes out of a run's folder is what the trainer held."""

import hashlib
import shutil

import pytest
import torch

from noisewise.generation import trained as module
from noisewise.generation.trained import load_trained
from noisewise.training import checkpoint
from noisewise.training.config import ModelConfig
from noisewise.training.run import Run
from tests.generation.runs import checkpoint_of, copy_of_run, damage, settings, trained_once


def weights_of(trained):
    return {name: value.clone() for name, value in trained.model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A run, and what its trainer held when each checkpoint was written: the weights and their average."""
    run = Run(settings(out=str(tmp_path_factory.mktemp("watched") / "run")))
    held = {}
    for step in run.advance():
        if step % 6 == 0:
            last = {name: value.clone() for name, value in run.trainer.model.state_dict().items()}
            with run.trainer.ema.applied():
                held[step] = last, {name: value.clone() for name, value in run.trainer.model.state_dict().items()}
    run.close()
    return run.folder.path, held


@pytest.mark.parametrize("step", [6, 12])
def test_both_kinds_of_weights_are_those_that_the_trainer_held(watched, step):
    folder, held = watched
    last, average = held[step]
    assert not same(last, average)
    assert same(weights_of(load_trained(folder, step=step, weights="model")), last)
    assert same(weights_of(load_trained(folder, step=step)), average)


def test_the_newest_checkpoint_is_the_default_and_a_path_names_another(watched):
    folder, held = watched
    assert (load_trained(folder).step, load_trained(str(folder)).step) == (12, 12)
    early = load_trained(checkpoint_of(folder, 6))
    assert (early.step, early.folder) == (6, folder)
    assert same(weights_of(early), held[6][1])


def test_a_checkpoint_may_be_named_from_inside_its_folder(watched, monkeypatch):
    monkeypatch.chdir(watched[0] / "checkpoints")
    assert load_trained("step-00000006").step == 6
    monkeypatch.chdir(watched[0])
    assert load_trained(".").step == 12


def test_it_knows_what_is_needed_to_generate_without_the_data(watched):
    trained = load_trained(watched[0])
    assert (trained.shape, trained.classes, trained.image, trained.latents, trained.clip) == ((1, 8, 8), 0, True, None, 1.0)
    file = checkpoint_of(watched[0], 12) / "ema.safetensors"
    assert trained.digest == hashlib.sha256(file.read_bytes()).hexdigest()
    assert load_trained(watched[0], weights="model").digest not in (trained.digest, "")
    assert not trained.model.training
    assert not any(parameter.requires_grad for parameter in trained.model.parameters())
    estimate = trained.denoiser()(torch.zeros(2, 1, 8, 8), torch.tensor(0.5, dtype=torch.float64))
    assert estimate.shape == (2, 1, 8, 8)
    assert bool(torch.isfinite(estimate).all())


def test_a_model_of_classes_takes_labels():
    trained = load_trained(trained_once(conditional=True))
    assert trained.classes == 10
    x, u = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor(0.5, dtype=torch.float64)
    one, other = (trained.denoiser(torch.tensor([label] * 2))(x, u) for label in (1, 2))
    assert not torch.equal(one, other)


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(tmp_path):
    run, told = copy_of_run(tmp_path), []
    damage(run, 12)
    assert load_trained(run, tell=told.append).step == 6
    assert len(told) == 1
    assert "step-00000012" in told[0]
    assert "checksum" in told[0]
    with pytest.raises(checkpoint.CheckpointError, match="step-00000012"):
        load_trained(run, step=12)
    damage(run, 6, "model")
    with pytest.raises(checkpoint.CheckpointError, match="none of the 2 checkpoints"):
        load_trained(run, tell=told.append)


def test_a_checkpoint_that_is_removed_once_it_was_read_is_used(tmp_path, monkeypatch):
    run, expected = copy_of_run(tmp_path), load_trained(trained_once()).digest

    def built_while_the_run_goes_on(*args, **settings):
        shutil.rmtree(run / "checkpoints")
        return build_model(*args, **settings)

    build_model = module.build_model
    monkeypatch.setattr(module, "build_model", built_while_the_run_goes_on)
    trained = load_trained(run)
    assert (trained.step, trained.digest) == (12, expected)


def test_a_checkpoint_that_is_removed_before_it_was_read_gives_way_to_a_newer_one(tmp_path, monkeypatch):
    run, load = copy_of_run(tmp_path), checkpoint.load
    shutil.rmtree(checkpoint_of(run, 6))

    def replaced(path, lazy=False):
        """As if the run had gone on: the one that was found is gone, and there is another."""
        if path.name == checkpoint.name_of(12):
            shutil.rmtree(path)
            shutil.copytree(checkpoint_of(trained_once(), 6), checkpoint_of(run, 6))
        return load(path)

    monkeypatch.setattr(checkpoint, "load", replaced)
    assert load_trained(run, tell=pytest.fail).step == 6
    shutil.copytree(checkpoint_of(trained_once(), 12), checkpoint_of(run, 12))
    shutil.rmtree(checkpoint_of(run, 6))
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 12; it has 6"):
        load_trained(run, step=12)


def test_what_is_missing_is_named(tmp_path):
    run = copy_of_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="is no run: it has no config"):
        load_trained(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="is no run"):
        load_trained(tmp_path / "nothing" / "checkpoints" / "step-00000006")
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 7; it has 6, 12"):
        load_trained(run, step=7)
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 7; it has 6, 12"):
        load_trained(checkpoint_of(run, 7))
    with pytest.raises(ValueError, match=r"step 12.*step-00000006|step-00000006.*step 12"):
        load_trained(checkpoint_of(run, 6), step=12)
    with pytest.raises(ValueError, match="unknown weights 'best': choose one of ema, model"):
        load_trained(run, weights="best")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(FileNotFoundError, match="no checkpoint yet"):
        load_trained(run)


class Tied(torch.nn.Module):
    """Two names in the state dict for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(1, 1, 3, padding=1)
        self.second = self.first

    def forward(self, x, time):
        return self.second(self.first(x))


def test_tied_weights_are_averaged_under_all_their_names(tmp_path):
    model = ModelConfig(name="tests.generation.test_trained:Tied", options={})
    run = Run(settings(out=str(tmp_path / "run"), model=model))
    for _ in run.advance():
        pass
    with run.trainer.ema.applied():
        average = run.trainer.model.first.weight.detach().clone()
    run.close()
    trained = load_trained(tmp_path / "run")
    assert torch.equal(trained.model.first.weight, average)
    assert torch.equal(trained.model.second.weight, average)
    assert not torch.equal(load_trained(tmp_path / "run", weights="model").model.second.weight, average)


def test_a_compiled_model_makes_the_same_numbers(watched, monkeypatch):
    compiler, graphs = torch.compile, []

    def counting(graph, example):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda model, dynamic, **_: compiler(model, backend=counting, dynamic=dynamic))
    torch._dynamo.reset()
    plain, compiled = (load_trained(watched[0], compiled=one) for one in (False, True))
    x, time = torch.randn(3, *plain.shape), torch.tensor([1, 50, 999])
    assert torch.equal(compiled.call(x, time, None), plain.call(x, time, None))
    assert graphs != []
    assert same(weights_of(compiled), weights_of(plain))


def test_a_model_that_cannot_be_compiled_is_called_as_it_is_and_the_user_is_told_once(watched, monkeypatch):
    def failing(*_):
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(torch, "compile", lambda model, **_: failing)
    monkeypatch.setattr(module, "with_labels", lambda model: model)
    told = []
    plain, compiled = load_trained(watched[0]), load_trained(watched[0], compiled=True, tell=told.append)
    x, time = torch.randn(3, *plain.shape), torch.tensor([1, 50, 999])
    for _ in range(2):
        assert torch.equal(compiled.call(x, time), plain.call(x, time))
    assert told == ["the model is not compiled: RuntimeError: no compiler"]
