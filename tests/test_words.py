"""Text for a terminal, and what errors suggest."""

import pytest

from noisewise.words import closest, in_lines, printable, unknown

SPEC = "adaptive:estimator=lookahead,target=(minsnr)+none"


@pytest.mark.parametrize("width", [1, 10, 24, 100])
def test_specs_are_broken_between_words_alone(width):
    lines = in_lines(SPEC, width).split("\n")
    assert "".join(lines) == SPEC
    assert all(line[-1] in ":,+=(" for line in lines[:-1])
    assert (len(lines) == 1) == (width >= len(SPEC))


def test_control_characters_are_written_out():
    assert printable("a\x1b[0mb\n") == "a\\x1b[0mb\n"


def test_the_closest_word_is_found_or_none():
    assert closest("unifrm", ["logit_normal", "uniform"]) == "uniform"
    assert closest("zzz", ["logit_normal", "uniform"]) is None
    assert closest("MinSNR", ["uniform", "minsnr"]) == "minsnr"
    assert closest("ddpmscheduler", ["uniform", "DDPMScheduler"]) == "DDPMScheduler"
    assert closest("zzz", []) is None


def test_the_message_names_what_was_meant_and_what_there_is():
    assert unknown("sampler", "unifrm", {"beta": 1, "uniform": 2}) == (
        "unknown sampler 'unifrm': did you mean 'uniform'? Known: beta, uniform"
    )
    assert unknown("sampler", "zzz", ["beta"]) == "unknown sampler 'zzz'. Known: beta"
    assert unknown("sampler", "unifrm", ["uniform"], listed=False) == "unknown sampler 'unifrm': did you mean 'uniform'?"
    assert unknown("sampler", "zzz", ["beta"], listed=False) == "unknown sampler 'zzz'. Known: beta"
    assert unknown("option of beta", "zzz", []) == "unknown option of beta 'zzz'. It has none."
