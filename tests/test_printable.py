"""Text for a terminal."""

import pytest

from noisewise.printable import in_lines, printable

SPEC = "adaptive:estimator=lookahead,target=(minsnr)+none"


@pytest.mark.parametrize("width", [1, 10, 24, 100])
def test_specs_are_broken_between_words_alone(width):
    lines = in_lines(SPEC, width).split("\n")
    assert "".join(lines) == SPEC
    assert all(line[-1] in ":,+=(" for line in lines[:-1])
    assert (len(lines) == 1) == (width >= len(SPEC))


def test_control_characters_are_written_out():
    assert printable("a\x1b[0mb\n") == "a\\x1b[0mb\n"
