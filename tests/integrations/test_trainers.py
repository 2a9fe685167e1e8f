"""The pages on other projects' trainers: their lines are those of stand-ins that learn and resume bit for bit."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

import noisewise
from noisewise import EDM, Flow, Recipe, Uniform
from tests.integrations import trainer_shapes
from tests.integrations.trainer_shapes import LeRobot

PAGES = Path(__file__).parents[2] / "docs" / "trainers"
SHAPES = {"kohya": "Kohya", "torchcfm": "TorchCFM", "lerobot": "LeRobot", "onetrainer": "OneTrainer"}


def fenced(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (PAGES / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)


def from_page(page, name):
    """The class that the page tells to save as a file."""
    namespace = {}
    exec(fenced(page, "python")[0], namespace)
    return namespace[name]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Learn after a few steps, with the lines as they are on the page."""
    monkeypatch.setattr(noisewise, "recipe", partial(noisewise.recipe, warmup=3, every=2, strata=10))


def shape(page):
    if page == "musubi":
        return trainer_shapes.musubi(from_page("musubi", "Noisewise"))
    if page == "edm2":
        return trainer_shapes.edm2(from_page("edm2", "Loss"))
    return getattr(trainer_shapes, SHAPES[page])


@pytest.mark.parametrize("page", [*SHAPES, "musubi", "edm2"])
def test_a_trainer_with_the_lines_of_its_page_learns_and_resumes_bit_for_bit(page, tmp_path):
    trainer = shape(page)
    whole, part = trainer().steps(0, 12), trainer().steps(0, 7)
    part.save(tmp_path)
    resumed = trainer(tmp_path).steps(7, 12)
    states = [run.recipe.state_dict() for run in (whole, part, resumed)]
    assert whole.recipe.sampler.step == 12
    assert not torch.equal(states[0]["sampler.table.mass"], states[1]["sampler.table.mass"])
    for name, value in states[0].items():
        assert torch.equal(value, states[2][name]), name
    for one, other in zip(whole.network.parameters(), resumed.network.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("page", SHAPES)
def test_the_lines_of_the_page_are_those_of_the_stand_in(page):
    code = Path(trainer_shapes.__file__).read_text()
    lines = {line.partition("  # noqa")[0].strip() for line in code.splitlines()}
    blocks = [block for block in fenced(page, "diff") if block.startswith("@@")]  # others are variants, told in words
    added = [line[1:].strip() for block in blocks for line in block.splitlines() if line.startswith("+")]
    here = [line for line in added if not line.startswith(("import", "from"))]
    assert len(here) > 5
    assert [line for line in here if line not in lines] == []


def test_a_policy_inside_peft_takes_its_times_from_the_recipe():
    peft = pytest.importorskip("peft")
    run = LeRobot(wrap=lambda policy: peft.get_peft_model(policy, peft.LoraConfig(r=2, target_modules=["network"])))
    assert run.steps(0, 3).recipe.sampler.step == 3


def test_a_mask_normalised_over_the_batch_stays_so():
    run, uniform = LeRobot(), Recipe(Uniform(Flow()))
    model = run.accelerator.unwrap_model(run.network).model
    batch = {"action": torch.randn(4, 8, 4), "action_is_pad": torch.arange(8) >= torch.tensor([3, 8, 5, 0])[:, None]}
    model.sample_time = lambda bsize, device: uniform.sample(torch.empty(bsize, device=device)).time
    torch.manual_seed(1)
    ours = run.loss_of(run.network, batch, recipe=uniform)
    model.sample_time = lambda bsize, device: uniform.last.time
    torch.manual_seed(1)
    torch.testing.assert_close(ours, run.loss_of(run.network, batch))


def test_the_uncertainty_loss_is_edm2s_with_weights_of_one():
    """Equations 14 to 16 and 21 of Karras et al. 2024, at the levels that were drawn."""
    loss, net = from_page("edm2", "Loss")(), trainer_shapes.Preconditioned()
    loss.recipe.attach(torch.optim.Adam(net.parameters()))
    images = torch.randn(4, 2, 4, 4)
    torch.manual_seed(1)
    ours = loss(net, images)
    sigma = EDM(mean=-0.4, std=1.0).log_snr(loss.recipe.last.u).mul(-0.5).exp()[:, None, None, None]
    torch.manual_seed(1)
    denoised, logvar = net(images + sigma * torch.randn_like(images), sigma, return_logvar=True)
    weight = (sigma**2 + 0.25) / (0.5 * sigma) ** 2
    expected = weight / logvar.exp() * (denoised - images) ** 2 + logvar
    torch.testing.assert_close(ours.sum(), expected.sum())
