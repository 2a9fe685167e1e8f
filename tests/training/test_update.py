"""Clipping, Adam and the average in one kernel: against torch and double precision, and when it is not for a parameter.

The kernel's tests need Triton, and a GPU or Triton's interpreter (TRITON_INTERPRET=1).
"""

import math
import os
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from noisewise.training.config import EMAConfig, OptimizerConfig
from noisewise.training.ema import EMA
from noisewise.training.fast import update
from noisewise.training.fast.update import FusedMove, fused_move, in_one_order, parts
from noisewise.training.optimizer import clip_gradients, gradient_norm, make_optimizer, set_learning_rate, step_if_finite

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RUNS = find_spec("triton") is not None and (DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
kernel = pytest.mark.skipif(not RUNS, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")
LAST = torch.channels_last
SHAPES = [(1,), (3,), (5, 7), (2048,), (4099,), (16, 3, 3, 3), (40, 20, 3, 3), (8, 4, 1, 1), ()]


class Weights(nn.Module):
    """Parameters of many shapes, those of convolutions channels last, and one that is not trained."""

    def __init__(self, shapes=SHAPES):
        super().__init__()
        torch.manual_seed(0)
        values = [torch.randn(shape).to(DEVICE) for shape in shapes]
        values = [value.contiguous(memory_format=LAST) if value.ndim == 4 else value for value in values]
        self.trained = nn.ParameterList(values)
        self.frozen = nn.Parameter(torch.randn(300).to(DEVICE), requires_grad=False)


class Training:
    """A model, a parameter beside it that has no average, their optimizer and average, ready as they are for a recording."""

    def __init__(self, config, shapes=SHAPES):
        self.config, self.model = config, Weights(shapes)
        self.beside = nn.Parameter(torch.ones(10, device=DEVICE))
        self.ema = EMA(self.model, EMAConfig())
        self.ema.average["frozen"] += 1  # so that it has somewhere to go
        self.parameters = [*self.model.trained, self.beside]
        self.optimizer = make_optimizer(self.parameters, config, DEVICE, graphed=True)
        before = [parameter.detach().clone() for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        with torch.no_grad():
            for parameter, value in zip(self.parameters, before, strict=True):
                parameter.copy_(value)
            for state in self.optimizer.state.values():
                for value in state.values():
                    value.zero_()

    def fused(self):
        return fused_move(self.optimizer, self.ema.pairs(), self.config.clip)

    def plain(self, norm, finite, blend):
        clip_gradients(self.parameters, norm, self.config.clip)
        step_if_finite(self.optimizer, finite)
        self.ema.blend(blend)

    def tensors(self):
        states, averages = [self.optimizer.state[parameter] for parameter in self.parameters], dict(self.ema.pairs())
        return {
            "weights": [parameter.detach() for parameter in (*self.parameters, self.model.frozen)],
            "averages": [averages[parameter] for parameter in (*self.model.trained, self.model.frozen)],
            **{name: [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")},
        }


class Exact:
    """The same in double precision, by the formulas."""

    def __init__(self, training):
        self.config = training.config
        values = {name: [value.double() for value in values] for name, values in training.tensors().items()}
        self.weights, self.averages = values["weights"], values["averages"]
        self.first, self.second, self.count = values["exp_avg"], values["exp_avg_sq"], 0

    def move(self, gradients, lr, blend):
        """`gradients` are None if the step is left out."""
        (b1, b2), decay, decoupled = self.config.betas, self.config.weight_decay, self.config.name == "adamw"
        if gradients is not None:
            self.count += 1
            norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
            scale = 1.0 if self.config.clip is None else min(1.0, self.config.clip / (norm + 1e-6))
            for i, gradient in enumerate(gradients):
                w, g = self.weights[i], gradient.double() * scale
                w, g = (w * (1 - lr * decay), g) if decoupled else (w, g + decay * w)
                self.first[i] = b1 * self.first[i] + (1 - b1) * g
                self.second[i] = b2 * self.second[i] + (1 - b2) * g * g
                mean, square = self.first[i] / (1 - b1**self.count), self.second[i] / (1 - b2**self.count)
                self.weights[i] = w - lr * mean / (square.sqrt() + self.config.eps)
        averaged = [*self.weights[:-2], self.weights[-1]]  # all but the one beside the model
        self.averages = [a + blend * (w - a) for a, w in zip(self.averages, averaged, strict=True)]

    def tensors(self):
        return {"weights": self.weights, "averages": self.averages, "exp_avg": self.first, "exp_avg_sq": self.second}


def errors(found, exact):
    """Typical and largest, relative to the largest number of the tensor."""
    pairs = zip(found, exact, strict=True)
    differences = torch.cat([((mine.double() - theirs) / theirs.abs().max()).flatten() for mine, theirs in pairs])
    return float(differences.square().mean().sqrt()), float(differences.abs().max())


# The kernel --------------------------------------------------------------------------------------------------------------

CONFIGS = {
    "clipped": OptimizerConfig(name="adam", clip=1.0),
    "not clipped": OptimizerConfig(name="adam", clip=1e6),
    "no limit": OptimizerConfig(name="adamw", clip=None),
    "decay of the gradient": OptimizerConfig(name="adam", weight_decay=0.1, clip=1.0),
    "decoupled decay": OptimizerConfig(name="adamw", weight_decay=0.1, clip=1.0),
    "other numbers": OptimizerConfig(name="adamw", betas=(0.5, 0.9999), eps=1e-3, clip=10.0),
    "no memory": OptimizerConfig(name="adam", betas=(0.0, 0.99), clip=1.0),
}
BAD = (0, 7)


@kernel
@pytest.mark.parametrize("case", CONFIGS)
def test_twenty_steps_are_as_exact_as_those_of_torch(case):
    config = CONFIGS[case]
    ours, plain = Training(config), Training(config)
    exact, fused = Exact(ours), ours.fused()
    assert isinstance(fused, FusedMove)
    for k in range(20):
        lr, blend = 2.0**-6 * (k + 1) / 20, torch.tensor(1 / (k + 2), device=DEVICE)
        for i, (one, other) in enumerate(zip(ours.parameters, plain.parameters, strict=True)):
            one.grad.copy_(torch.randn(one.shape) * 10.0 ** (i % 4 - 2))
            other.grad.copy_(one.grad)
        if k in BAD:
            ours.parameters[2].grad[1, 1] = plain.parameters[2].grad[1, 1] = math.nan
        before = {name: [value.clone() for value in values] for name, values in ours.tensors().items()}
        gradients = [parameter.grad.clone() for parameter in ours.parameters]
        for training, move in ((ours, fused), (plain, plain.plain)):
            set_learning_rate(training.optimizer, lr)
            norm = gradient_norm(training.parameters)
            move(norm, torch.isfinite(norm), blend)
        exact.move(None if k in BAD else gradients, float(ours.optimizer.param_groups[0]["lr"]), float(blend))
        assert all(bool((step == k + 1 - sum(bad <= k for bad in BAD)).all()) for step in ours.tensors()["step"])
        if k in BAD:
            for name in ("weights", "exp_avg", "exp_avg_sq"):
                assert all(torch.equal(*pair) for pair in zip(ours.tensors()[name], before[name], strict=True)), name
    for name, wanted in exact.tensors().items():
        (mine, largest), (theirs, _) = (errors(training.tensors()[name], wanted) for training in (ours, plain))
        assert mine <= 1.5 * theirs, f"{name}: {mine:.2e}, torch {theirs:.2e}"
        assert largest < 1e-5, name
    moving, _ = errors(exact.averages, exact.weights[:-2] + exact.weights[-1:])
    assert moving > 1e-3  # or nothing was seen of the averages


@kernel
def test_a_share_may_be_a_plain_number():
    config = OptimizerConfig()
    by_number, by_tensor = Training(config), Training(config)
    for training, blend in ((by_number, 0.25), (by_tensor, torch.tensor(0.25, device=DEVICE))):
        training.fused()(gradient_norm(training.parameters), torch.tensor(True, device=DEVICE), blend)
    for one, other in zip(by_number.tensors()["averages"], by_tensor.tensors()["averages"], strict=True):
        assert torch.equal(one, other)


@kernel
def test_there_may_be_many_tensors_with_steps_of_their_own():
    config = OptimizerConfig(clip=None, lr=0.125, eps=0.0)
    training = Training(config, shapes=[(2,)] * 300)
    for i, parameter in enumerate(training.parameters):
        parameter.grad.fill_(i + 1.0)
        training.optimizer.state[parameter]["step"].fill_(i)
    before = [parameter.detach().clone() for parameter in training.parameters]
    norm = gradient_norm(training.parameters)
    training.fused()(norm, torch.isfinite(norm), 0.5)
    b1, b2 = config.betas
    for i, (parameter, was) in enumerate(zip(training.parameters, before, strict=True)):
        assert float(training.optimizer.state[parameter]["step"]) == i + 1
        size = 0.125 * (1 - b1) / (1 - b1 ** (i + 1)) / math.sqrt((1 - b2) / (1 - b2 ** (i + 1)))
        torch.testing.assert_close(parameter.detach(), was - size, rtol=1e-6, atol=3e-7)


# Tables, and when the kernel fits ----------------------------------------------------------------------------------------


@pytest.fixture
def with_triton(monkeypatch):
    """The tables can be made without it."""
    monkeypatch.setattr(update, "find_spec", lambda name: object())


@pytest.mark.parametrize("sizes", [[1], [8], [7, 0, 9, 16, 17], [0]])
def test_parts_hold_every_element_once(sizes):
    found = [(tensor, at) for tensor, part in parts(sizes, 8) for at in range(8 * part, min(8 * part + 8, sizes[tensor]))]
    assert found == [(tensor, at) for tensor, size in enumerate(sizes) for at in range(size)]


def test_elements_are_in_one_order_where_walking_through_memory_visits_the_same():
    x = torch.zeros(4, 3, 5, 5)
    last = x.contiguous(memory_format=LAST)
    assert in_one_order([x, x.clone()])
    assert in_one_order([last, last.clone()])
    assert not in_one_order([x, last])
    assert not in_one_order([last, x])
    assert not in_one_order([x[:, :, ::2], x[:, :, ::2]])  # gaps
    assert not in_one_order([x, torch.zeros(1).expand(4, 3, 5, 5)])  # one element for all
    assert not in_one_order([torch.zeros(3, 4), torch.zeros(4, 3).T])
    assert not in_one_order([torch.zeros(6), torch.zeros(7)])
    one = torch.zeros(4, 3, 1, 1)
    assert in_one_order([one, one.as_strided(one.shape, (3, 1, 3, 3))])  # strides of a single element mean nothing


def test_the_table_names_all_tensors_of_a_parameter(with_triton):
    training = Training(OptimizerConfig())
    fused = training.fused()
    assert len(fused.rows) == len(SHAPES) + 2
    for row, parameter in zip(fused.rows, training.parameters, strict=False):
        state = training.optimizer.state[parameter]
        assert row.parameter is parameter
        assert row.gradient is parameter.grad
        assert row.first is state["exp_avg"]
        assert row.second is state["exp_avg_sq"]
        assert row.step is state["step"]
    averages = dict(training.ema.pairs())
    assert all(row.average is averages.get(row.parameter) for row in fused.rows)
    assert fused.rows[-2].average is None  # beside the model
    assert fused.rows[-1].parameter is training.model.frozen
    addresses = [[0 if x is None else x.data_ptr() for x in row[:5]] for row in fused.rows]
    assert fused.table[:, :5].tolist() == addresses
    assert fused.table[:, 5].tolist() == [row.parameter.numel() for row in fused.rows]
    assert fused.steps[-1] == 0


def test_a_parameter_without_a_gradient_is_not_trained_but_averaged(with_triton):
    training = Training(OptimizerConfig())
    training.parameters[0].grad = None
    (row,) = (row for row in training.fused().rows if row.parameter is training.parameters[0])
    assert (row.gradient, row.first, row.second, row.step) == (None,) * 4
    assert row.average is not None


def gradient_in_another_order(training):
    weight = next(weight for weight in training.parameters if weight.ndim == 4)
    weight.grad = weight.grad.contiguous(memory_format=torch.contiguous_format)


def average_in_another_order(training):
    training.ema.average["trained.5"] = training.ema.average["trained.5"].contiguous()


def part_of_a_larger_buffer(training):
    training.parameters[1].grad = torch.zeros(4, device=DEVICE)[1:]


def learning_rate_as_a_number(training):
    training.optimizer.param_groups[0]["lr"] = 1e-3


def several_groups(training):
    training.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, device=DEVICE))]})


def moments_in_double(training):
    state = training.optimizer.state[training.parameters[0]]
    state["exp_avg"] = state["exp_avg"].double()


def largest_moments(training):
    training.optimizer.param_groups[0]["amsgrad"] = True


def upwards(training):
    training.optimizer.param_groups[0]["maximize"] = True


def another_optimizer(training):
    training.optimizer.__class__ = type("Own", (torch.optim.Adam,), {})


def sparse_gradient(training):
    training.parameters[2].grad = training.parameters[2].grad.to_sparse()


OTHERS = [
    gradient_in_another_order,
    average_in_another_order,
    part_of_a_larger_buffer,
    learning_rate_as_a_number,
    several_groups,
    moments_in_double,
    largest_moments,
    upwards,
    another_optimizer,
    sparse_gradient,
]


@pytest.mark.parametrize("change", OTHERS)
def test_it_leaves_to_torch_what_it_does_not_fit(change, with_triton):
    training = Training(OptimizerConfig())
    assert training.fused() is not None
    change(training)
    assert training.fused() is None


def test_it_leaves_everything_to_torch_where_there_is_no_triton(monkeypatch):
    monkeypatch.setattr(update, "find_spec", lambda name: None)
    assert Training(OptimizerConfig()).fused() is None
