"""The notebook: its cells run in order, and its pictures are inside."""

import base64
import json
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
NOTEBOOK = json.loads(FILE.read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_the_cells_run_in_order(monkeypatch, capsys):
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(plt, "show", lambda: None)
    monkeypatch.setenv("NOISEWISE_STEPS", "12")
    namespace = {"__name__": "__main__"}
    plt.close("all")
    for number, cell in enumerate(CODE):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
    assert len(plt.get_fignums()) == 2
    plt.close("all")
    assert namespace["recipe"].sampler.step == 12
    assert "attached  to Adam" in capsys.readouterr().out


def test_the_outputs_are_inside_and_small():
    """A hosted viewer shows them without running anything."""
    outputs = [output for cell in CODE for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}
    pictures = [base64.b64decode(output["data"]["image/png"]) for output in outputs if "data" in output]
    assert [picture[:4] for picture in pictures] == [b"\x89PNG"] * 2
    assert FILE.stat().st_size < 200_000
    assert (NOTEBOOK["nbformat"], NOTEBOOK["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
