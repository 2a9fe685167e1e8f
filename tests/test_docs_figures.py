"""Numbers in the pages on training and FID are those of the result files."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def rows(name):
    return [json.loads(line) for line in (ROOT / "benchmarks" / "results" / name).read_text().splitlines()]


def test_the_sanity_figures_are_those_measured():
    page = (ROOT / "docs" / "fid.md").read_text()
    (row,) = rows("fid_sanity.jsonl")
    assert row["device"] in page
    for field, digits in (("first_tenth_against_train", 4), ("test_against_train", 4), ("images_per_s", 0)):
        assert f"| {row['float32'][field]:.{digits}f} | {row['tf32'][field]:.{digits}f} |" in page
    assert all(abs(value) < 0.05 for value in row["minus_expected"].values())


def test_the_cost_of_the_presets_is_that_measured():
    table = (ROOT / "docs" / "training.md").read_text().partition("| preset | batch |")[2].partition("\n\n")[0]
    claims = re.findall(r"^\| `([\w-]+)` \| (\d+) \| ([\d.]+) \| ([\d.]+) GiB \|$", table, re.MULTILINE)
    measured = {row["preset"]: row for row in rows("preset_cost.jsonl")}
    assert {name for name, *_ in claims} == set(measured) - {"digits"}
    for name, batch, speed, memory in claims:
        row = measured[name]
        assert (int(batch), float(speed)) == (row["batch"], round(1 / row["seconds_per_step"], 2))
        assert float(memory) == round(row["gpu_memory_gib"], 1)


def test_what_a_constant_average_did_is_that_measured():
    page = (ROOT / "docs" / "training.md").read_text()
    found = {(row["sampler"], row["weights"]): row for row in rows("ema_start.jsonl")}
    ema, last = (found["uniform", weights]["distance"] for weights in ("ema", "model"))
    assert f"FID-5k was {ema:.0f}, against {last:.0f} for the last" in page
    assert found["uniform", "ema"]["config"]["ema"] == {"kind": "constant", "decay": 0.9995, "ramp": False, "std": 0.1}
    assert found["uniform", "ema"]["steps"] == 3200
    assert round(0.9995**3200, 1) == 0.2
