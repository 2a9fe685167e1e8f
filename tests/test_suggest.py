"""What errors suggest."""

from noisewise.suggest import closest, unknown


def test_the_closest_word_is_found_or_none():
    assert closest("unifrm", ["logit_normal", "uniform"]) == "uniform"
    assert closest("zzz", ["logit_normal", "uniform"]) is None
    assert closest("zzz", []) is None


def test_the_message_names_what_was_meant_and_what_there_is():
    assert unknown("sampler", "unifrm", {"beta": 1, "uniform": 2}) == (
        "unknown sampler 'unifrm': did you mean 'uniform'? Known: beta, uniform"
    )
    assert unknown("sampler", "zzz", ["beta"]) == "unknown sampler 'zzz'. Known: beta"
    assert unknown("sampler", "unifrm", ["uniform"], listed=False) == "unknown sampler 'unifrm': did you mean 'uniform'?"
    assert unknown("sampler", "zzz", ["beta"], listed=False) == "unknown sampler 'zzz'. Known: beta"
    assert unknown("option of beta", "zzz", []) == "unknown option of beta 'zzz'. It has none."
