"""One HTML file, complete in itself and no louder than its numbers."""

import base64
import io
import json
import re
from html.parser import HTMLParser

import pytest
from PIL import Image

from noisewise.study.report import conditions, sentence, write_report
from tests.study.made import measured
from tests.training.tiny import tiny


class Reader(HTMLParser):
    """Collects tags, what they point to, and the cells of tables."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "data", "action", "srcset")]

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "td":
            self.cells.append(data)


def made(tmp_path, distance=1.0, shape=(1, 8, 8), names=("uniform", "a<b>&")):
    configs, results = [], []
    for name in names:
        out = tmp_path / "runs" / str(len(configs))
        out.mkdir(parents=True)
        rows = [{"step": step, "density_by_level": [1.0] * 10} for step in (5, 10)]
        (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        configs.append(tiny(name="<script>", sampler=name, out=str(out)))
        results.append(measured(name, 0, distance, shape=shape))
    return configs, results


def test_the_page_needs_nothing_else_and_names_are_escaped(tmp_path):
    page = write_report(tmp_path, *made(tmp_path)).read_text()
    reader = Reader()
    reader.feed(page)
    assert "script" not in reader.tags
    assert "link" not in reader.tags
    assert len(reader.links) == 1
    assert reader.links[0].startswith("data:image/png;base64,")
    assert "@import" not in page
    assert "url(" not in page
    assert not re.search(r"https?://", page)
    picture = Image.open(io.BytesIO(base64.b64decode(reader.links[0].partition(",")[2])))
    assert min(picture.size) > 300
    assert "a&lt;b&gt;&amp;" in page
    assert "uniform" in reader.cells
    assert "one seed" in page


@pytest.mark.parametrize("shape", [(4, 8, 8), (2,)])
def test_samples_that_are_no_pictures_are_left_out(tmp_path, shape):
    assert write_report(tmp_path, *made(tmp_path, distance=None, shape=shape)).exists()


def test_one_sampler_alone_is_compared_with_nothing(tmp_path):
    configs, results = made(tmp_path, names=("uniform",))
    assert "nothing to compare with" in sentence(results)
    assert write_report(tmp_path, configs, results).exists()


def test_the_sentence_says_what_the_seeds_say():
    results = [
        measured(name, seed, value) for seed in range(2) for name, value in (("uniform", 2.0), ("good", 1.0), ("bad", 3.0))
    ]
    said = sentence(results)
    assert "good was better than uniform in every seed (0.50 times its value)" in said
    assert "bad was worse than uniform in every seed (1.50 times its value)" in said
    mixed = [measured("uniform", 0, 2.0), measured("other", 0, 1.0), measured("uniform", 1, 2.0), measured("other", 1, 3.0)]
    assert "in every seed" not in sentence(mixed)
    assert "too few to judge" in sentence(mixed[:2])
    assert "held-out loss" in sentence([measured("uniform", 0, None), measured("other", 0, None)])


def test_the_conditions_name_budget_and_seeds():
    results = [measured("uniform", 0, 1.0)]
    assert "Each run had 12 steps" in conditions([tiny()], results)
    assert "1 seed." in conditions([tiny()], results)
    both = conditions([tiny(seed=seed, seconds=2.5) for seed in (0, 1)], results)
    assert "2.5 seconds of training steps" in both
    assert "2 seeds." in both
    assert "it is not FID" in both
    assert "FID" not in conditions([tiny()], [measured("uniform", 0, None)])
