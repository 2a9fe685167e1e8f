"""From a model to estimates of x0."""

from types import SimpleNamespace

import pytest
import torch

from noisewise.generation.guidance import denoiser
from noisewise.objective import PREDICTIONS, Objective
from noisewise.processes import DDPM, EDM, PROCESSES, Flow

NULL = 10


class Labelled(torch.nn.Module):
    """A model that depends on its label in a way that is not linear, and remembers how it was called."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, x, time, labels):
        self.calls.append((x, time, labels))
        label = labels.view(-1, *[1] * (x.ndim - 1)).float()
        return torch.tanh(x + torch.sin(label)) * (1 + 0.1 * label)


def batch(n=5):
    x = torch.randn(n, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    return x, torch.arange(n), torch.tensor(0.6, dtype=torch.float64)


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("process", PROCESSES)
def test_a_perfect_model_gives_back_x0(process, prediction):
    process = PROCESSES[process]()
    objective = Objective(process, prediction)
    x0, _, _ = batch()
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(1))
    for u in (torch.tensor(0.3, dtype=torch.float64), torch.linspace(0.1, 0.7, 5, dtype=torch.float64)):
        levels = u.expand(5)
        x = process.add_noise(x0, noise, levels)
        seen = []

        def perfect(inputs, time, levels=levels, x=x, seen=seen):
            seen.append((inputs, time))
            torch.testing.assert_close(inputs, objective.model_input(x, levels))
            torch.testing.assert_close(time, process.time(levels), check_dtype=False)
            return objective.target(x0, noise, levels)

        torch.testing.assert_close(denoiser(perfect, objective)(x, u), x0, rtol=1e-3, atol=1e-3)
        assert len(seen) == 1
        assert seen[0][0].dtype == torch.float32
        assert seen[0][1].dtype == (torch.int64 if process.steps else torch.float32)


@pytest.mark.parametrize("prediction", ["eps", "x0", "v"])
@pytest.mark.parametrize("guidance", [0.0, 0.5, 3.0])
def test_guidance_is_null_plus_w_times_the_difference(guidance, prediction):
    model, objective = Labelled(), Objective(DDPM.linear(), prediction)
    x, labels, u = batch()
    conditional = denoiser(model, objective, labels)(x, u)
    null = denoiser(model, objective, torch.full_like(labels, NULL))(x, u)
    model.calls.clear()
    guided = denoiser(model, objective, labels, guidance=guidance, null_label=NULL)(x, u)
    torch.testing.assert_close(guided, null + guidance * (conditional - null), rtol=1e-4, atol=1e-4)
    assert [len(x) for x, _, _ in model.calls] == [10]
    assert model.calls[0][2].tolist() == [0, 1, 2, 3, 4, *[NULL] * 5]


def test_no_guidance_is_one_evaluation_of_the_batch():
    model = Labelled()
    x, labels, u = batch()
    denoiser(model, Objective(Flow(), "flow"), labels, null_label=NULL)(x, u)
    assert [len(x) for x, _, _ in model.calls] == [5]


def test_guidance_keeps_to_its_interval():
    model, objective = Labelled(), Objective(Flow(), "flow")
    x, labels, _ = batch()
    conditional = denoiser(model, objective, labels)
    always = denoiser(model, objective, labels, guidance=4.0, null_label=NULL)
    within = denoiser(model, objective, labels, guidance=4.0, null_label=NULL, interval=(0.3, 0.5))
    for u, expected, size in [(0.2, conditional, 5), (0.3, always, 10), (0.5, always, 10), (0.51, conditional, 5)]:
        u = torch.tensor(u, dtype=torch.float64)
        model.calls.clear()
        result = within(x, u)
        assert [len(x) for x, _, _ in model.calls] == [size]
        torch.testing.assert_close(result, expected(x, u))
    mixed = torch.tensor([0.2, 0.3, 0.4, 0.6, 0.9], dtype=torch.float64)
    inside = torch.tensor([False, True, True, False, False])[:, None, None, None]
    torch.testing.assert_close(within(x, mixed), torch.where(inside, always(x, mixed), conditional(x, mixed)))


def test_float64_states_keep_their_type_and_the_model_its_float32():
    model, objective = Labelled(), Objective(EDM(), "edm")
    x, labels, u = batch()
    result = denoiser(model, objective, labels)(80 * x.double(), u)
    assert result.dtype == torch.float64
    assert {tensor.dtype for tensor in model.calls[0][:2]} == {torch.float32}


def test_other_calls_and_diffusers_outputs_are_understood():
    x, labels, u = batch()
    objective = Objective(Flow(), "x0")
    keyword = denoiser(
        lambda sample, timestep, class_labels: SimpleNamespace(sample=sample * class_labels.view(-1, 1, 1, 1)),
        objective,
        labels,
        call=lambda model, x, time, labels: model(sample=x, timestep=time, class_labels=labels),
    )
    torch.testing.assert_close(keyword(x, u), x * labels.view(-1, 1, 1, 1))


def test_pure_noise_gives_zero_where_the_noise_is_predicted():
    x, _, _ = batch()
    one = torch.ones((), dtype=torch.float64)
    assert torch.equal(denoiser(lambda x, t: 0.9 * x, Objective(Flow(), "eps"))(x, one), torch.zeros_like(x))
    for prediction in ("x0", "v", "flow", "edm"):
        result = denoiser(lambda x, t: 0.9 * x, Objective(Flow(), prediction))(x, one)
        assert torch.isfinite(result).all()
        assert float(result.abs().max()) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guidance": 2.0}, "guidance needs labels"),
        ({"guidance": 2.0, "labels": torch.arange(5)}, "null_label"),
        ({"interval": (0.5, 0.2)}, "low <= high"),
        ({"interval": (-1.0, 0.2)}, "0 <= low"),
    ],
)
def test_wrong_settings_are_explained(options, message):
    with pytest.raises(ValueError, match=message):
        denoiser(Labelled(), Objective(Flow(), "flow"), **options)


def test_wrong_outputs_are_explained():
    x, labels, u = batch()
    objective = Objective(Flow(), "flow")
    with pytest.raises(ValueError, match="5 labels for a batch of 3"):
        denoiser(Labelled(), objective, labels)(x[:3], u)
    with pytest.raises(ValueError, match=r"shape \(5, 3, 2, 2\), got \(5, 6\)"):
        denoiser(lambda x, t: torch.zeros(5, 6), objective)(x, u)
    with pytest.raises(TypeError, match="returned tuple"):
        denoiser(lambda x, t: (x,), objective)(x, u)
