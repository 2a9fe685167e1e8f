"""Two real processes generate and evaluate what one does."""

from pathlib import Path

import numpy as np
import pytest

from noisewise.plain_files import read_rows
from tests.generation.runs import copy_of_run, trained_once
from tests.torchrun import run_ranks
from tests.workers.evaluate import evaluated

WORKER = Path(__file__).parents[1] / "workers" / "evaluate.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """For this process and for two ranks: the folder of results, the run, and what each rank says."""
    trained_once()
    both = {}
    for ranks in (1, 2):
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        run, out = copy_of_run(folder), folder / "out"
        out.mkdir()
        both[ranks] = out, run, run_ranks(WORKER, out, str(run)) if ranks == 2 else [evaluated(out, str(run))]
    return both


def test_every_command_ends_well_on_every_rank(both):
    for ranks, (_, _, results) in both.items():
        assert [result["world"] for result in results] == [ranks] * ranks
        assert all(set(result["status"].values()) == {0} for result in results)


def test_the_images_are_the_same_files(both):
    one, two = ({path.name: path.read_bytes() for path in (both[ranks][0] / "png").iterdir()} for ranks in (1, 2))
    assert len(one) == 24
    assert one == two
    arrays = [np.load(both[ranks][0] / "images.npz", allow_pickle=False)["images"] for ranks in (1, 2)]
    assert arrays[0].shape == (23, 8, 8, 1)
    assert np.array_equal(*arrays)
    assert not (both[2][0] / "images.npz.parts").exists()


@pytest.mark.parametrize("which", ["many", "few", "folder"])
def test_the_numbers_are_the_same(both, which):
    one, two = (both[ranks][2][0]["found"][which] for ranks in (1, 2))
    assert two["digits-frechet"] == pytest.approx(one["digits-frechet"], rel=1e-9)
    assert two["images"] == one["images"] == {"many": 60, "few": 6, "folder": 23}[which]
    assert two["real_images"] == one["real_images"]
    assert two.get("heldout") == one.get("heldout")
    for name in {"precision_recall", "density_coverage"} & set(one):
        assert two[name] == pytest.approx(one[name], rel=1e-6)
    if which == "many":
        assert two["sliced_wasserstein"] == pytest.approx(one["sliced_wasserstein"], rel=1e-9)
        assert two["digits-frechet_interval"]["value"] == pytest.approx(one["digits-frechet"], rel=1e-6)


def test_a_run_gets_one_row_an_evaluation_however_many_ranks(both):
    for ranks in (1, 2):
        found = [row for row in read_rows(both[ranks][1] / "metrics.jsonl") if row.get("kind") == "evaluation"]
        assert [row["images"] for row in found] == [60, 6]
        assert [row["environment"]["processes"] for row in found] == [ranks] * 2
