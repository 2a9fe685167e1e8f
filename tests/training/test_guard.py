"""The guard's means and counts, and whom it names when training breaks down."""

import math

import pytest
import torch

from noisewise.training.guard import Diverged, Guard

NAN, INF = float("nan"), float("inf")


def tell(guard, loss=1.0, norm=1.0, times=(1, 2, 3), losses=(0.1, 0.2, 0.3)):
    loss, norm = torch.tensor(loss), torch.tensor(norm)
    guard.update(loss, norm, torch.isfinite(loss + norm), torch.tensor(times), torch.tensor(losses))


def message_of(guard, limit=1, what_now="Do something"):
    with pytest.raises(Diverged) as error:
        guard.check(limit, what_now)
    return str(error.value)


def test_means_are_of_the_steps_since_the_last_call():
    guard = Guard()
    for loss, norm in [(1.0, 10.0), (2.0, 20.0), (6.0, 60.0)]:
        tell(guard, loss, norm)
    assert guard.means() == (3.0, 30.0)
    tell(guard, 5.0, 7.0)
    assert guard.means() == (5.0, 7.0)
    assert all(math.isnan(value) for value in guard.means())


@pytest.mark.parametrize(("loss", "norm"), [(NAN, 1.0), (INF, 1.0), (1.0, NAN), (1.0, -INF), (INF, NAN)])
def test_skipped_steps_are_counted_and_left_out_of_the_means(loss, norm):
    guard = Guard()
    tell(guard, 2.0, 4.0)
    tell(guard, loss, norm)
    tell(guard, 4.0, 8.0)
    assert int(guard.skipped) == 1
    assert guard.means() == (3.0, 6.0)
    assert int(guard.skipped) == 1  # over all of training


def test_means_do_not_lose_small_losses_among_many():
    guard = Guard()
    for _ in range(1000):
        tell(guard, 0.1, 1e4)
    loss, norm = guard.means()
    assert loss == pytest.approx(float(torch.tensor(0.1)), rel=1e-12)
    assert norm == 1e4


def test_only_steps_in_a_row_stop_training():
    guard = Guard()
    for _ in range(5):
        tell(guard, NAN)
        tell(guard, NAN)
        guard.check(3, "")
        tell(guard)
        guard.check(3, "")
    assert (int(guard.run), int(guard.skipped)) == (0, 10)
    for count in (1, 2, 3):
        tell(guard, NAN)
        assert int(guard.run) == count
    guard.check(4, "")
    assert message_of(guard, 3).startswith(
        "3 steps in a row had a loss or gradient that is not finite and were skipped (13 in all)"
    )


def test_a_long_bad_run_is_not_forgiven_for_a_good_step_before_the_check():
    """On a GPU the check comes only at log points: steps that failed long ago may be followed by one that did not."""
    guard = Guard()
    for _ in range(4):
        tell(guard, NAN)
    tell(guard)
    assert int(guard.run) == 0
    assert message_of(guard, 4).startswith("4 steps in a row")
    guard.check(1, "")  # it was reported; nothing has failed since


def test_short_bad_runs_between_two_checks_do_not_add_up():
    guard = Guard()
    for _ in range(3):
        tell(guard, NAN)
        tell(guard, NAN)
        tell(guard)
    guard.check(3, "")
    assert (int(guard.longest), int(guard.skipped)) == (0, 6)


def test_a_bad_run_counts_across_checks_and_checkpoints():
    guard = Guard()
    tell(guard, NAN)
    tell(guard, NAN)
    guard.check(3, "")
    restored = Guard()
    restored.load_state_dict(guard.state_dict())
    tell(restored, NAN)
    tell(restored)
    assert message_of(restored, 3).startswith("3 steps in a row")


def test_the_message_names_exactly_the_timesteps_whose_loss_was_not_finite():
    guard = Guard()
    tell(guard, NAN, 1.0, (5, 6, 7, 8), (NAN, 0.1, 0.1, 0.1))  # an earlier one does not count
    tell(guard, NAN, 1.0, (40, 3, 999, 3, 17), (0.5, NAN, INF, 0.2, -INF))
    message = message_of(guard, 2)
    assert "in the last one the loss was not finite at timesteps 3, 17, 999 (3 of 5 samples). Do something" in message


def test_a_single_timestep_and_times_that_are_not_whole_are_named_too():
    guard = Guard()
    tell(guard, NAN, 1.0, (0.125, 0.5), (0.5, NAN))
    assert "not finite at timestep 0.5 (1 of 2 samples)" in message_of(guard)


def test_when_only_the_gradient_is_bad_the_largest_losses_are_named():
    guard = Guard()
    tell(guard, 1.0, INF, (10, 20, 30, 40, 50, 60, 70), (0.7, 0.1, 0.6, 0.5, 0.9, 0.2, 0.8))
    message = message_of(guard)
    assert (
        "all losses were finite and the gradient was not; the largest losses were at timesteps 10, 30, 40, 50, 70." in message
    )


def test_very_many_timesteps_are_not_all_listed():
    guard = Guard()
    tell(guard, NAN, 1.0, tuple(range(100)), (NAN,) * 100)
    message = message_of(guard)
    assert "timesteps 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ... (100 of 100 samples)" in message


def test_batches_of_different_sizes_are_no_trouble():
    guard = Guard()
    tell(guard, NAN, 1.0, (1, 2), (NAN, 0.1))
    tell(guard)
    tell(guard, NAN, 1.0, (4, 5, 6, 7), (0.1, NAN, 0.1, 0.1))
    assert "at timestep 5 (1 of 4 samples)" in message_of(guard)
    tell(guard, NAN, 1.0, (8,), (NAN,))
    assert "at timestep 8 (1 of 1 samples)" in message_of(guard, 2)


def test_counts_and_sums_go_on_after_a_checkpoint():
    first, second = Guard(), Guard()
    for guard in (first, second):
        tell(guard, 1.0, 2.0)
        tell(guard, NAN)
        tell(guard, 3.0, 5.0)
        tell(guard, NAN)
    restored = Guard()
    restored.load_state_dict(second.state_dict())
    for guard in (first, restored):
        tell(guard, NAN, 1.0, (9, 11), (NAN, 0.1))
        assert message_of(guard, 2).startswith("2 steps in a row")
        assert "(3 in all)" in message_of(guard, 2)
        assert "at timestep 9" in message_of(guard, 2)
        assert guard.means() == (2.0, 3.5)


def test_a_batch_that_was_good_is_never_blamed():
    """After loading a checkpoint the first batch seen may be a good one, while the count says that steps were bad."""
    guard = Guard()
    tell(guard, NAN, losses=(NAN, 0.2, 0.3))
    again = Guard()
    again.load_state_dict(guard.state_dict())
    tell(again)
    assert "they were before the last checkpoint" in message_of(again)
