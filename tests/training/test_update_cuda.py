"""The kernel for weights and averages in the graphs of whole trainers; by itself it is tested in test_update.py."""

import pytest
import torch

from noisewise.training.fast import graphs
from tests.training.test_cuda import SometimesNaN
from tests.training.test_fast_cuda import trainer, uncompiled  # noqa: F401  a fixture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def flat(made):
    return {f"{part}/{name}": value.clone() for part, values in made.tensors().items() for name, value in values.items()}


CASES = {
    "plain": [],
    "accumulated": ["--accumulation=4"],
    "rising decay": ["--ema.ramp=true"],
    "decoupled decay": ["--optimizer.name=adamw", "--optimizer.weight_decay=0.1"],
    "no clipping": ["--optimizer.clip=null"],
    "strong clipping": ["--optimizer.clip=0.01"],
    "learned weighting": ["--sampler=uniform+learned"],
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_in_a_graph_is_the_one_torch_makes_there(case, uncompiled, monkeypatch):  # noqa: F811
    options = ["--sampler=uniform", "--precision=fp32", "--ema.decay=0.9", *CASES[case]]
    fused = trainer(*options)
    fused.warm_up()
    assert fused.arithmetic.in_graph is not None
    assert fused.arithmetic.fused is None
    monkeypatch.setattr(graphs, "fused_move", lambda *_: None)
    plain = trainer(*options)
    plain.warm_up()
    assert plain.arithmetic.ready
    assert plain.arithmetic.in_graph is None
    start = flat(fused)
    for made in (fused, plain):
        made.training_step()
    found, expected = flat(fused), flat(plain)
    moved = {name.partition("/")[0] for name, value in found.items() if not torch.equal(value, start[name])}
    assert {"model", "ema", "optimizer"} <= moved
    assert found.keys() == expected.keys()
    for name, value in expected.items():  # gradients are the same bit for bit; 1 - 0.999 in torch is off by 1.3e-5
        scale = float(value.double().abs().max()) if value.numel() else 0.0
        torch.testing.assert_close(
            found[name], value, rtol=3e-5, atol=1e-6 * scale, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_skipped_step_leaves_the_optimizer_alone_while_the_average_moves_on(uncompiled):  # noqa: F811
    model = SometimesNaN()
    made = trainer("--sampler=uniform", "--precision=fp32", "--ema.decay=0.5", model=model)
    made.warm_up()
    assert made.arithmetic.in_graph is not None
    made.training_step()
    before = flat(made)
    model.broken.fill_(1)
    made.training_step()
    model.broken.fill_(0)
    after = flat(made)
    parts = {name.partition("/")[0] for name in before if not torch.equal(before[name], after[name])}
    assert "ema" in parts
    assert not {"model", "optimizer"} & parts
    made.training_step()
    assert float(made.optimizer.state[model.scale]["step"]) == 2


def test_a_load_after_a_recording_records_the_new_places(uncompiled, tmp_path):  # noqa: F811
    from noisewise.training import checkpoint

    made = trainer("--sampler=uniform", "--precision=fp32")
    made.warm_up()
    for _ in range(3):
        made.training_step()
    point = checkpoint.load(checkpoint.save(tmp_path, made.step, made.tensors(), made.state()))
    for _ in range(2):
        made.training_step()
    wanted = flat(made)
    made.load(point)
    made.warm_up()
    assert made.arithmetic.in_graph is not None
    for _ in range(2):
        made.training_step()
    found = flat(made)
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
