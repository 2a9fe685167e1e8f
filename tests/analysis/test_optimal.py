"""noisewise analyze optimal: rows, findings and the file in the folder of a run."""

import csv
import json

import pytest
import torch

from noisewise import DDPM, Objective
from noisewise.analysis.optimal import findings, last_held_out, left_to_learn, rows_of
from noisewise.commands.cli import main
from noisewise.data import open_data
from noisewise.metrics.optimal_loss import FILE, load_optimal_loss, optimal_loss
from noisewise.training.options import as_yaml
from tests.training.tiny import tiny

FAST = ["--levels=10", "--images=60", "--formats=png"]


def command(tmp_path, *more):
    return main(["analyze", "optimal", *FAST, "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out"), *more])


def table(tmp_path):
    with (tmp_path / "out" / "optimal.csv").open() as file:
        return list(csv.DictReader(file))


def run_folder(tmp_path, held_out=None, **settings):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(as_yaml(tiny(out=str(folder), **settings)))
    rows = [{"kind": "evaluation", "step": step, "heldout": {"loss_by_level": losses}} for step, losses in held_out or []]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_preset_gives_the_optimal_loss_of_its_data(tmp_path):
    assert command(tmp_path, "--preset", "digits", "--process", "cosine", "--prediction", "v") == 0
    expected = optimal_loss(Objective(DDPM.cosine(), "v"), open_data("digits"), 10, draws=60)
    rows = table(tmp_path)
    torch.testing.assert_close(
        torch.tensor([float(row["loss"]) for row in rows]).double(), expected.loss, rtol=1e-6, atol=1e-12
    )
    assert [row["memorised"] == "True" for row in rows] == expected.memorised.tolist()
    assert 0 < expected.memorised.sum() < 10
    assert (tmp_path / "out" / "optimal.png").stat().st_size > 10_000
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_another_loss_is_refused_also_where_a_result_is_kept(tmp_path, capsys):
    assert command(tmp_path, "--preset", "digits") == 0
    assert command(tmp_path, "--preset", "digits", "--loss", "l1") == 1
    assert "optimal for loss='mse' alone" in capsys.readouterr().err


def test_flips_classes_and_references_are_those_of_the_configuration(tmp_path):
    assert (
        command(tmp_path, "--preset", "digits", "--data.flip", "true", "--model.conditional", "true", "--references=500") == 0
    )
    source = open_data("digits")
    expected = optimal_loss(Objective(DDPM.linear()), source, 10, draws=60, flip=True, classes=True, references=500)
    assert [float(row["loss"]) for row in table(tmp_path)] == pytest.approx(expected.loss.tolist(), rel=1e-6)
    assert expected.samples == 3000


def test_a_run_keeps_it_and_its_last_held_out_loss_stands_beside(tmp_path, capsys):
    losses = [[0.5] * 10, [0.4] * 10, [9.0] * 7]  # the last at other levels
    folder = run_folder(tmp_path, list(zip((100, 200, 300), losses, strict=True)))
    assert command(tmp_path, "--run", str(folder)) == 0
    rows = table(tmp_path)
    assert {float(row["held_out"]) for row in rows} == {0.4}
    assert [float(row["reducible"]) for row in rows] == pytest.approx([0.4 - float(row["loss"]) for row in rows])
    kept = load_optimal_loss(folder / FILE, tiny().objective())
    assert kept.loss.tolist() == pytest.approx([float(row["loss"]) for row in rows], rel=1e-9)
    assert "Step 200" in capsys.readouterr().out


def test_what_is_left_is_told_of_levels_that_mean_something():
    found = optimal_loss(Objective(DDPM.linear()), open_data("digits"), 10, draws=60)
    held_out = found.loss + 0.01
    held_out[found.memorised] += 100  # which must not count
    held_out[8] += 0.5
    said = left_to_learn(found, 7, held_out)
    trusted = ~found.memorised
    assert f"{float((held_out - found.loss)[trusted].sum() / held_out[trusted].sum()):.1%}" in said
    assert "0.51000, at u = 0.850" in said
    alone = optimal_loss(Objective(DDPM.linear()), torch.zeros(1, 4), 10, draws=2)
    assert "cannot be told" in left_to_learn(alone, 7, held_out)
    assert len(findings(alone)) == 2
    assert "held_out" not in rows_of(alone, None)[0]


def test_a_run_that_was_never_evaluated_has_no_held_out_loss(tmp_path):
    found = optimal_loss(Objective(DDPM.linear()), torch.zeros(1, 4), 10, draws=2)
    assert last_held_out(run_folder(tmp_path), found) is None
