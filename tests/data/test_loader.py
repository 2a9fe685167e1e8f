"""The order of the data, and that every way of reading them gives the same batches."""

import gc
import os
import pickle

import numpy as np
import psutil
import pytest
import torch

from noisewise.data import Batches, Source, Synthetic, open_data
from noisewise.data.loader import DROP, FLIP, HELD, Direct, Resident, Workers, decisions, permutation, stream_key
from noisewise.data.source import ArraySource
from noisewise.streams import uniforms

N = 50
WAYS = {
    "in memory": {"resident": None},
    "resident": {"resident": True},
    "in process": {"resident": False, "workers": 0},
    "workers": {"resident": False, "workers": 2},
}


@pytest.fixture(scope="module")
def mapped_file(tmp_path_factory):
    """Pictures each of which tells its row: all values of row r are r, but for a dark left half."""
    path = tmp_path_factory.mktemp("mapped") / "pictures.npy"
    values = np.broadcast_to(np.arange(N, dtype=np.uint8)[:, None, None, None] + 100, (N, 3, 4, 6)).copy()
    values[..., :3] -= 100
    np.save(path, values)
    np.save(path.with_name("pictures_labels.npy"), np.arange(N) % 7)
    return path


@pytest.fixture
def mapped(mapped_file):
    return open_data("array", mapped_file)


def rows_of(samples):
    """The rows that the samples tell, flipped or not."""
    low = torch.minimum(samples[:, 0, 0, 0], samples[:, 0, 0, -1])
    return ((low + 1) * 127.5).round().long()


def flipped(samples):
    return samples[:, 0, 0, 0] > samples[:, 0, 0, -1]


def straight(source, positions, **settings):
    with Batches(source, **{"seed": 3, "batch": 8, **settings}) as batches:
        return [batches.get(p) for p in positions]


def join(batches):
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


# Order


@pytest.mark.parametrize("batch", [1, 7, 8, 50, 120])
def test_each_epoch_visits_each_row_once_and_drops_no_remainder(mapped, batch):
    count = 3 * N // batch + 1
    samples, labels = join(straight(mapped, range(0, count * batch, batch), batch=batch, workers=0))
    rows = rows_of(samples)
    epochs = rows[: 3 * N].reshape(3, N)
    assert torch.equal(epochs.sort(1).values, torch.arange(N).expand(3, N))
    assert not torch.equal(epochs[0], epochs[1])
    assert not torch.equal(epochs[0], torch.arange(N))
    assert torch.equal(labels, rows % 7)


def test_the_order_never_changes_between_versions():
    """Known answers: a checkpoint of today must meet the same data tomorrow."""
    assert permutation(8, seed=0, epoch=0).tolist() == [4, 7, 0, 1, 2, 5, 6, 3]
    assert permutation(8, seed=0, epoch=1).tolist() == [7, 3, 4, 6, 0, 2, 1, 5]
    assert permutation(8, seed=1, epoch=0).tolist() == [6, 5, 3, 4, 7, 0, 1, 2]


def test_seeds_give_different_orders_and_any_integer_is_a_seed():
    orders = {tuple(permutation(N, seed, 0)) for seed in (-1, 0, 1, 2**40, 2**63 - 1)}
    assert len(orders) == 5


def test_at_most_two_permutations_are_held(mapped):
    with Batches(mapped, batch=3 * N + 1, seed=0, workers=0) as batches:
        for position in (0, 10 * N, 7, 1000 * N):
            batches.get(position)
            assert len(batches.order.held) <= HELD == 2


# Ranks, restarts, ways of reading


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_each_batch_in_order(mapped, world):
    settings = {"flip": True, "label_dropout": 0.3, "workers": 0}
    alone = straight(mapped, range(0, 160, 8), **settings)
    shares = [straight(mapped, range(0, 160, 8), rank=rank, world=world, **settings) for rank in range(world)]
    for step, (samples, labels) in enumerate(alone):
        together = join([share[step] for share in shares])
        assert torch.equal(together[0], samples)
        assert torch.equal(together[1], labels)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_reading_gives_the_same_batches(mapped, way):
    positions = [*range(0, 120, 8), 40, 48, 0, 1000, 1008]  # straight on, back, ahead
    expected = straight(mapped, positions, flip=True, label_dropout=0.2, resident=False, workers=0)
    source = in_memory(mapped) if way == "in memory" else mapped
    found = straight(source, positions, flip=True, label_dropout=0.2, **WAYS[way])
    for (x, y), (their_x, their_y) in zip(expected, found, strict=True):
        assert torch.equal(x, their_x)
        assert torch.equal(y, their_y)
        assert x.dtype == torch.float32
        assert y.dtype == torch.int64


def in_memory(source):
    values, labels = source.read(np.arange(len(source)))
    return ArraySource("copy", values.numpy(), labels.numpy(), image=True)


@pytest.mark.parametrize("way", ["resident", "workers"])
def test_a_restart_at_any_position_continues_the_straight_run(mapped, way):
    run = straight(mapped, range(0, 200, 8), flip=True, **WAYS[way])
    for step in (1, 6, 20):
        again = straight(mapped, range(8 * step, 8 * step + 24, 8), flip=True, **WAYS[way])
        for (x, y), (their_x, their_y) in zip(run[step : step + 3], again, strict=True):
            assert torch.equal(x, their_x)
            assert torch.equal(y, their_y)


def test_workers_serve_each_rank_its_share(mapped):
    expected = straight(mapped, range(0, 80, 8), rank=1, world=2, workers=0)
    found = straight(mapped, range(0, 80, 8), rank=1, world=2, resident=False, workers=1)
    assert torch.equal(join(expected)[0], join(found)[0])


def test_the_feed_is_chosen_by_where_the_data_lie(mapped):
    def feed(source, **settings):
        with Batches(source, batch=2, seed=0, **settings) as batches:
            return type(batches._feed), batches.resident

    assert feed(mapped) == (Workers, False)
    assert feed(mapped, workers=0) == (Direct, False)
    assert feed(mapped, resident=True) == (Resident, True)
    assert feed(Synthetic((1, 4, 4))) == (Direct, True)


def test_a_resident_copy_is_filled_by_workers_chunk_by_chunk(mapped, monkeypatch):
    monkeypatch.setattr("noisewise.data.loader.CHUNK_BYTES", mapped.nbytes // 5)
    with Batches(mapped, batch=2, seed=0, resident=True, workers=2) as batches:
        values, labels = mapped.read(np.arange(N))
        assert torch.equal(batches._feed.values, values)
        assert torch.equal(batches._feed.labels, labels)


def test_data_without_labels_give_none():
    for settings in WAYS.values():
        samples, labels = straight(Synthetic((2, 3, 3)), [0], **settings)[0]
        assert samples.shape == (8, 2, 3, 3)
        assert labels is None


def test_reading_leaves_the_callers_random_state_alone(mapped):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    straight(mapped, [0, 8, 40], flip=True, label_dropout=0.5, resident=False, workers=1)
    assert torch.equal(torch.get_rng_state(), before)


# Flips and label dropout


def test_half_of_the_samples_are_flipped_whatever_the_batch(mapped):
    by_batch = [
        flipped(join(straight(mapped, range(0, 2000, batch), batch=batch, flip=True, workers=0))[0]) for batch in (8, 20, 250)
    ]
    assert torch.equal(by_batch[0], by_batch[1])
    assert torch.equal(by_batch[0], by_batch[2])
    assert abs(int(by_batch[0].sum()) - 1000) < 4 * 22.4  # standard deviation of a binomial


def test_a_flip_mirrors_left_and_right_and_nothing_else(mapped):
    plain, _ = straight(mapped, [0], batch=40, workers=0)[0]
    mirrored, _ = straight(mapped, [0], batch=40, flip=True, workers=0)[0]
    which = flipped(mirrored)
    assert 0 < int(which.sum()) < 40
    assert torch.equal(mirrored, torch.where(which[:, None, None, None], plain.flip(-1), plain))


def test_label_dropout_replaces_its_share_by_the_number_of_classes(mapped):
    kept = join(straight(mapped, range(0, 4000, 40), batch=40, workers=0))[1]
    dropped = join(straight(mapped, range(0, 4000, 40), batch=40, label_dropout=0.1, workers=0))[1]
    gone = dropped == mapped.classes
    assert abs(int(gone.sum()) - 400) < 4 * 19
    assert torch.equal(dropped[~gone], kept[~gone])
    everything = join(straight(mapped, [0], label_dropout=1.0, workers=0))[1]
    assert (everything == mapped.classes).all()


def test_decisions_are_one_stream_entered_anywhere():
    whole = decisions(9, FLIP, 0, 1000, 0.5, "cpu")
    assert torch.equal(whole, uniforms(stream_key(9, FLIP), 1000) < 0.5)
    assert torch.equal(whole[123:200], decisions(9, FLIP, 123, 77, 0.5, "cpu"))
    assert decisions(9, FLIP, 2**70, 4, 0.5, "cpu").shape == (4,)
    both = float((whole & decisions(9, DROP, 0, 1000, 0.5, "cpu")).float().mean())
    assert both == pytest.approx(0.25, abs=0.06)  # flips tell nothing of drops


# Resources


def children():
    return [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]


def test_workers_end_with_close(mapped):
    before = {child.pid for child in children()}
    batches = Batches(mapped, batch=4, seed=0, resident=False, workers=2)
    batches.get(0)
    started = [child for child in children() if child.pid not in before]
    assert len(started) >= 2
    batches.close()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive
    with pytest.raises(ValueError, match="closed"):
        batches.get(4)
    batches.close()


def test_a_jump_ends_the_old_workers(mapped):
    before = {child.pid for child in children()}
    with Batches(mapped, batch=4, seed=0, rank=1, world=2, resident=False, workers=1) as batches:
        batches.get(0)
        old = [child for child in children() if child.pid not in before and "tracker" not in " ".join(child.cmdline())]
        assert old
        batches.get(4)
        batches.get(8)
        assert all(child.is_running() for child in old)  # straight on, the same ones go on
        batches.get(40)
        _, alive = psutil.wait_procs(old, timeout=10)
        assert not alive


@pytest.mark.parametrize("way", ["in process", "resident"])
def test_memory_stays_flat_over_ten_thousand_batches(tmp_path, way):
    np.save(tmp_path / "x.npy", np.zeros((2000, 3, 16, 16), np.uint8))
    source = open_data("array", tmp_path / "x.npy")
    process = psutil.Process(os.getpid())
    with Batches(source, batch=16, seed=0, flip=True, **WAYS[way]) as batches:
        used = {}
        for step in range(10_001):
            batches.get(16 * step)
            if step in (1000, 10_000):
                gc.collect()
                used[step] = process.memory_info().rss
        assert len(batches.order.held) <= 2
    assert used[10_000] - used[1000] < 4 << 20  # a batch leaked at each step would be 110 MB, its row numbers 1.2 MB


def test_a_mapped_source_travels_to_workers_as_its_path(mapped):
    content = pickle.dumps(mapped)
    assert len(content) < mapped.nbytes / 2
    assert torch.equal(pickle.loads(content).read(np.arange(5))[0], mapped.read(np.arange(5))[0])


# Errors


class Damaged(Source):
    """Row 3 cannot be read."""

    name, shape, nbytes = "damaged", (1,), 10

    def __len__(self):
        return 10

    def read(self, rows):
        if 3 in rows:
            raise ValueError("row 3 is damaged: mend it")
        return torch.zeros(len(rows), 1), None

    def fingerprint(self):
        return "0"


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_while_reading_arrives_in_its_own_words_and_again_when_asked_again(workers):
    position = int(np.flatnonzero(permutation(10, 0, 0) == 3)[0])
    with Batches(Damaged(), batch=1, seed=0, resident=False, workers=workers) as batches:
        batches.get(position - 1)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^row 3 is damaged: mend it$"):
                batches.get(position)
        samples, _ = batches.get(position + 1)
        assert samples.shape == (1, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 6, "world": 4}, "multiple of the 4 ranks, got 6"),
        ({"batch": 0}, "positive multiple"),
        ({"rank": 2, "world": 2}, "got rank 2 of 2"),
        ({"label_dropout": 1.5}, "from 0 to 1"),
        ({"workers": -1}, "0 or more"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Batches(Synthetic((1, 4, 4), 3), **{"batch": 4, "seed": 0, **settings})


def test_flips_need_pictures_and_dropout_needs_labels():
    with pytest.raises(ValueError, match="unset flip"):
        Batches(Synthetic((4, 4, 4), floats=True), batch=2, seed=0, flip=True)
    with pytest.raises(ValueError, match="has none"):
        Batches(Synthetic((1, 4, 4)), batch=2, seed=0, label_dropout=0.1)
    with pytest.raises(ValueError, match="count from 0"):
        Batches(Synthetic((1, 4, 4)), batch=2, seed=0).get(-1)


# CUDA


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", ["resident", "in process", "workers"])
def test_cuda_gives_the_same_batches_and_a_resident_copy_never_waits_for_the_device(mapped, way):
    expected = straight(mapped, range(0, 120, 8), flip=True, label_dropout=0.2, workers=0)
    with Batches(mapped, batch=8, seed=3, device="cuda", flip=True, label_dropout=0.2, **WAYS[way]) as batches:
        batches.get(0)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = [batches.get(p) for p in range(0, 120, 8)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for (x, y), (their_x, their_y) in zip(expected, found, strict=True):
        torch.testing.assert_close(their_x.cpu(), x, rtol=0, atol=1e-6)
        assert torch.equal(their_y.cpu(), y)
