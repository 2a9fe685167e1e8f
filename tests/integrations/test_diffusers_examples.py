"""The examples for diffusers: run as a new user would, resumed bit for bit, and shown on the page as they are."""

import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("diffusers_*.py"))
DIFFS = re.findall(r"^```diff\n(.*?)^```", (ROOT / "docs" / "trainers" / "diffusers.md").read_text(), re.DOTALL | re.MULTILINE)
SHORT = {
    "diffusers_unconditional": ["--num_epochs", "1", "--prediction_type", "v_prediction"],
    "diffusers_text_to_image_lora": ["--max_train_steps", "22", "--prediction_type", "v_prediction"],
    "diffusers_sd3": ["--max_train_steps", "22"],
}
REPORT = re.compile(r"^(?:timesteps from \d+|around sigma [\d.]+): loss (\d+\.\d+), drawn (\d+\.\d+) times", re.MULTILINE)


def test_every_example_is_tested():
    assert [path.stem for path in EXAMPLES] == sorted(SHORT)


def check_report(said, adapted):
    rows = [(float(loss), float(drawn)) for loss, drawn in REPORT.findall(said)]
    assert len(rows) == 5
    assert all(0 < loss < 10 for loss, _ in rows)
    assert (len({drawn for _, drawn in rows}) > 1) == adapted


@pytest.mark.slow
def test_an_example_runs_as_a_program_from_anywhere_without_the_hub(tmp_path):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / "diffusers_sd3.py"), *SHORT["diffusers_sd3"]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check_report(done.stdout, adapted=True)


def run_here(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example as a program, in this process, to save the imports."""
    AcceleratorState._reset_state(True)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diffusers_unconditional", "diffusers_text_to_image_lora"])
def test_the_others_run_from_anywhere_without_a_network(name, tmp_path, monkeypatch, capsys):
    def no_network(self, address):
        raise AssertionError(f"it wants to reach {address}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    run_here(name, *SHORT[name], monkeypatch=monkeypatch)
    check_report(capsys.readouterr().out, adapted=name != "diffusers_unconditional")  # one epoch ends within its warm-up


def assert_same(one: object, two: object) -> int:
    """Bit for bit, through dicts and lists; the number of tensors compared."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, two)
        return 1
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        return sum(assert_same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        assert len(one) == len(two)
        return sum(assert_same(a, b) for a, b in zip(one, two, strict=True))
    assert one == two
    return 0


@pytest.mark.slow
def test_the_accelerate_example_resumes_bit_for_bit(tmp_path, monkeypatch):
    def run(*arguments):
        run_here("diffusers_unconditional", *arguments, monkeypatch=monkeypatch)

    whole, part, resumed = (str(tmp_path / name) for name in ("whole", "part", "resumed"))
    run("--num_epochs", "2", "--output_dir", whole)
    run("--num_epochs", "1", "--output_dir", part)
    run("--num_epochs", "2", "--output_dir", resumed, "--resume_from_checkpoint", part)
    recipes = [torch.load(f"{folder}/custom_checkpoint_0.pkl", weights_only=True) for folder in (whole, part, resumed)]
    assert recipes[0]["sampler._extra_state"].tolist() == [32, 0, 0]
    assert assert_same(recipes[0], recipes[2]) > 5
    masses = [recipe["sampler.table.mass"] for recipe in recipes]
    assert not torch.equal(masses[0], masses[1])  # it learned after the checkpoint
    networks = [load_file(f"{folder}/model.safetensors") for folder in (whole, resumed)]
    assert assert_same(*networks) > 20


@pytest.mark.slow
def test_the_lora_example_resumes_bit_for_bit(tmp_path, monkeypatch):
    def run(*arguments):
        run_here("diffusers_text_to_image_lora", *arguments, monkeypatch=monkeypatch)

    whole, part, resumed = (str(tmp_path / name) for name in ("whole.pt", "part.pt", "resumed.pt"))
    run("--max_train_steps", "32", "--output", whole)
    run("--max_train_steps", "24", "--output", part)
    run("--max_train_steps", "32", "--output", resumed, "--resume_from_checkpoint", part)
    states = [torch.load(path, weights_only=True) for path in (whole, part, resumed)]
    assert set(states[0]) == {"lora", "optimizer", "recipe", "random_state"}
    assert assert_same(states[0], states[2]) > 20
    masses = [state["recipe"]["sampler.table.mass"] for state in states]
    assert not torch.equal(masses[0], masses[1])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_fits_a_screen_and_marks_what_differs(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 80
    assert 5 <= sum("# adaptive" in line for line in lines) <= 7


def without_settings(text: str) -> str:
    """What the page leaves out of the examples: comments, short warm-ups and specs from the command line."""
    text = text.replace(", warmup=20, every=10", "").replace("args.sampler", '"adaptive+minsnr:gamma=5"')
    return text.replace("args.weighting_scheme", '"adaptive"')


@pytest.mark.parametrize(("diff", "path"), list(zip(DIFFS[:3], reversed(EXAMPLES), strict=True)))
def test_the_page_shows_the_lines_of_the_example(diff, path):
    example = without_settings(path.read_text())
    code = [line.partition("  #")[0].strip() for line in example.splitlines()]
    added = [line[1:].strip() for line in diff.splitlines() if line.startswith("+")]
    removed = [line[1:].strip() for line in diff.splitlines() if line.startswith("-")]
    assert len(added) > 3
    assert [line for line in added if line not in code] == []
    assert [line for line in removed if line in code and line != "optimizer.step()"] == []
