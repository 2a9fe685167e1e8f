"""`noisewise reproduce`: every item at toy with far less to do, what its page holds, and that it goes on where it stopped."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from noisewise import papers
from noisewise.commands import reproduce
from noisewise.commands.cli import main, whole_parser
from noisewise.papers import SCALES, STUDIES
from noisewise.spec import build_parts, build_process, split_specs
from noisewise.study.launch import Local
from noisewise.study.outcome import read_comparison
from noisewise.study.worker import logged, work
from noisewise.training.options import config_parser, parse_config, with_files
from tests.training.tiny import DIT

TINY = f"--device=cpu --batch=8 --log.every=2 --log.sample_steps=2 --model.name=dit --model.options='{json.dumps(DIT)}'"
LESS = {
    "compare": f"{TINY} --seeds=1 --budget=4it --evaluate-at=1 --images=12 --checkpoint.keep=1",
    "analyze gradients": f"{TINY} --budget=2it --points=1 --levels=10 --rows=4",
    "analyze interdependence": f"{TINY} --budget=2it --points=1 --levels=10 --images=4 --steps=1",
    "analyze overhead": "--device=cpu --seconds=0.01 --widths=8 --batches=8 --steps-of-process=100",
}
VOID = {"meta", "img", "br", "wbr", "input", "line", "path", "use", "image", "rect", "polyline", "circle", "polygon"}


def shrunk(study):
    """The study with a toy that takes a moment."""
    toy = study.scales["toy"]
    lines = []
    for line in toy.commands:
        more = next((less for verb, less in LESS.items() if line.startswith(verb)), "")
        start, end = line.split(" --out ")
        lines.append(f"{start} {more} --out {end}")
    return replace(study, scales={**study.scales, "toy": replace(toy, commands=tuple(lines))})


class Here:
    """Runs the jobs of a comparison in this process; as if it were told to stop after so many."""

    def __init__(self):
        self.made, self.most = [], None

    def launch(self, launcher, jobs, stop):
        for job in jobs:
            if self.most is not None and len(self.made) >= self.most:
                stop.name = "SIGTERM"
                return
            with logged(job.folder):
                work(job, stop=stop)
            self.made.append(job.folder.name)


@pytest.fixture(scope="module")
def here():
    """Every study shrunk, and comparisons without processes of their own."""
    with pytest.MonkeyPatch.context() as patch:
        found = Here()
        patch.setattr(Local, "launch", lambda launcher, jobs, stop: found.launch(launcher, jobs, stop))
        made = {name: shrunk(study) for name, study in STUDIES.items()}
        patch.setattr(papers, "STUDIES", made)
        patch.setattr("noisewise.report.write_report", lambda folder: folder / "report.html")  # of compare: a second each
        patch.setattr(reproduce, "STUDIES", made)
        yield found


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("reproduce")


class Balance(HTMLParser):
    """What is open at the end of a page, and the words of its cells."""

    def __init__(self, page):
        super().__init__()
        self.open, self.cells, self.images = [], [], 0
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.images += tag == "img" and dict(attrs)["src"].startswith("data:image/")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th", "b", "p"):
            self.cells.append(data)


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_every_item_makes_its_page(name, here, out):
    assert main(["reproduce", name, "--out", str(out)]) == 0
    page, data = Balance((out / "toy" / f"{name}.html").read_text()), json.loads((out / "toy" / f"{name}.json").read_text())
    assert page.open == []
    tables = data["tables"]
    assert tables
    for table in tables:
        assert {len(row) for row in table["rows"]} == {len(table["heads"])}
        assert {cell for row in table["rows"] for cell in row} <= set(page.cells)
        assert any(re.search(r"\d", cell) for row in table["rows"] for cell in row[1:])
    assert data["says"] in page.cells
    assert data["found"] in page.cells
    assert "nan" not in json.dumps(data)
    assert not any("not finite" in cell for cell in page.cells)
    assert page.images or name.startswith("table") or name in ("fig1", "fig7")


@pytest.mark.slow
def test_what_is_there_is_not_made_again(here, out):
    assert main(["reproduce", "fig5", "fig4", "--out", str(out)]) == 0  # whichever tests have run before
    files = {path: path.stat().st_mtime_ns for path in (out / "toy").rglob("*.csv") if "fig" in path.parent.name}
    before = len(here.made)
    assert main(["reproduce", "fig1", "fig4", "fig5", "--out", str(out)]) == 0
    assert len(here.made) == before
    assert {path: path.stat().st_mtime_ns for path in files} == files


@pytest.mark.slow
def test_the_page_says_the_settings_that_it_was_made_with(here, tmp_path):
    assert main(["reproduce", "fig4", "speed-areas", "--out", str(tmp_path), "--seed", "3"]) == 0
    found = json.loads((tmp_path / "toy" / "fig4.json").read_text())
    assert found["command"].endswith(" --seed 3")
    assert all(" --seed 3 --out OUT/" in line for line in found["commands"])
    assert (tmp_path / "toy" / "fig4.html").read_text().count(" --seed 3") == 2  # of reproduce, and of what it stands for
    assert "--seed" not in json.loads((tmp_path / "toy" / "speed-areas.json").read_text())["commands"][0]  # has no preset


@pytest.mark.slow
def test_stopped_work_goes_on_where_it_was(here, tmp_path, capsys):
    here.made.clear()
    here.most = 2
    try:
        assert main(["reproduce", "table3", "table4", "--out", str(tmp_path)]) == 0
    finally:
        here.most = None
    assert "goes on where it was stopped" in capsys.readouterr().out
    assert (tmp_path / "toy" / "table3.html").is_file()
    assert not (tmp_path / "toy" / "table4.html").exists()
    assert main(["reproduce", "table3", "table4", "--out", str(tmp_path)]) == 0
    assert len(here.made) == len(set(here.made)) == 5  # two of table3 and three of table4, each once
    assert {run.status for run in read_comparison(tmp_path / "toy" / "linear").outcomes} == {"finished"}
    assert (tmp_path / "toy" / "table4.html").is_file()


def test_all_are_listed_at_every_scale(capsys):
    for scale in SCALES:
        assert main(["reproduce", "--list", "--scale", scale]) == 0
        shown = capsys.readouterr().out
        assert all(name in shown and study.scales[scale].takes in shown for name, study in STUDIES.items())


def test_names_that_do_not_exist_and_missing_data_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words, said in (
        (["tabel1"], "did you mean table1"),
        (["fig2", "--scale", "small"], "data/cifar10"),
        (["table2", "--scale", "paper"], "noisewise encode"),
    ):
        assert main(["reproduce", *words]) == 1
        assert said in capsys.readouterr().err.splitlines()[0]


def test_missing_weights_are_found_before_anything_is_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("noisewise.metrics.inception.find_spec", lambda name: None)
    assert main(["reproduce", "table1", "--scale", "small"]) == 1
    assert "noisewise[fid]" in capsys.readouterr().err.splitlines()[0]


@pytest.mark.parametrize("scale", ["small", "paper"])
@pytest.mark.parametrize("name", STUDIES)
def test_fids_weights_are_asked_for_where_images_are_compared(name, scale):
    made = STUDIES[name].scales[scale]
    assert ("noisewise[fid]" in made.needs) == any(line.startswith("compare") for line in made.commands)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", STUDIES)
def test_commands_of_every_scale_are_understood(name, scale, tmp_path):
    for words in STUDIES[name].scales[scale].words(tmp_path):
        args, rest = whole_parser().parse_known_args(words)
        if getattr(args, "preset", None):
            config = parse_config(config_parser(), with_files(rest, args.preset), [])
            config.check()
        schedules = split_specs(getattr(args, "schedules", None) or getattr(args, "process", None) or "linear")
        for spec in split_specs(getattr(args, "samplers", None) or "uniform"):
            for schedule in schedules:
                build_parts(spec, build_process(schedule), None, {})
