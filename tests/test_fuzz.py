"""A few cases of each kind; `make fuzz` runs them by the thousand."""

import pytest

from tests import fuzz

COUNTS = {"specs": 150, "configurations": 40, "batches": 40}


@pytest.mark.parametrize("kind", COUNTS)
def test_made_up_input_makes_sense_or_is_refused_in_one_line(kind):
    assert fuzz.run(kind, COUNTS[kind], seed=7) == []
