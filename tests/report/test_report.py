"""One HTML file, complete in itself and no louder than its numbers."""

import base64
import hashlib
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from noisewise.commands import cli
from noisewise.report import write_report
from noisewise.report.opening import lead, title
from noisewise.report.page import render
from noisewise.report.subject import Subject, read_subject
from noisewise.report.tables import command, differences
from noisewise.report.thumbnails import pictures_of
from noisewise.study.outcome import Failure, Plan
from noisewise.study.results import write_results
from noisewise.training.options import as_yaml
from tests.study.made import MACHINE, compared, curve, evaluations, planted, rewrite
from tests.training.tiny import tiny

LIMIT = 3_000_000


class Reader(HTMLParser):
    """Collects tags with their attributes, addresses, and the words of the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] not in ("script", "style"):
            self.words.append(data)

    def addresses(self):
        names = ("src", "href", "data", "action", "srcset", "xlink:href")
        return [found[name] for _, found in self.tags for name in names if name in found]

    def sections(self):
        return [found["id"] for tag, found in self.tags if tag == "section"]


def two_seeds(**changes):
    curves = {
        ("linear", sampler, seed): curve(*(scale * (1 + 0.013 * seed) * value for value in (4 / 3, 2 / 3)))
        for sampler, scale in (("uniform", 1.0), ("minsnr", 0.7))
        for seed in (0, 1)
    }
    return {**curves, **changes}


def test_the_numbers_are_those_of_the_results_to_the_last_digit(tmp_path):
    write_results(planted(tmp_path, two_seeds(), headline=500))
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    reader = Reader(write_report(tmp_path).read_text())
    found, run = {}, None
    for tag, attributes in reader.tags:
        run = attributes.get("data-run", run) if tag == "tr" else run
        if tag == "td" and "data-name" in attributes and run:
            found.setdefault(run, []).append((attributes["data-name"], attributes["data-value"]))
    assert list(found) == [row["run"] for row in rows]
    for row in rows:
        names = {"value": "distance", **{name: name for name in ("loss", "step", "seconds", "share", "headline")}}
        expected = [(name, point[key]) for point in row["curve"] for name, key in names.items() if point[key] is not None]
        assert ("headline", row["headline"]) in expected
        assert sorted((name, json.loads(value)) for name, value in found[row["run"]] if name in names) == sorted(expected)
    summaries = [attributes for tag, attributes in reader.tags if tag == "tr" and "data-ratio" in attributes]
    for sampler in ("uniform", "minsnr"):
        ends = [row["distance"] for row in rows if row["sampler"] == sampler]
        mine = [attributes for attributes in summaries if attributes["data-sampler"] == sampler]
        assert mine
        assert all(float(attributes["data-value"]) == sum(ends) / len(ends) for attributes in mine)


def test_the_page_needs_nothing_else_and_runs_its_own_script_alone(tmp_path):
    planted(tmp_path, two_seeds())
    page = write_report(tmp_path).read_text()
    reader = Reader(page)
    assert all(address.startswith(("data:image/", "#")) for address in reader.addresses())
    assert not {"link", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in reader.tags}
    assert "@import" not in page
    assert "url(" not in page
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}
    policy = next(found["content"] for tag, found in reader.tags if found.get("http-equiv") == "Content-Security-Policy")
    script = page.partition("<script>")[2].partition("</script>")[0]
    assert f"script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy
    assert policy.startswith("default-src 'none'")
    assert reader.sections() == ["first", "table", "density", "loss", "quality", "cost", "settings"]
    assert {f"#{name}" for name in reader.sections()[1:]} <= set(reader.addresses())


def test_every_picture_and_chart_says_what_it_shows(tmp_path):
    planted(tmp_path, two_seeds())
    reader = Reader(write_report(tmp_path).read_text())
    assert all(found.get("alt") for tag, found in reader.tags if tag == "img")
    charts = [found for tag, found in reader.tags if tag == "svg" and found["class"] in ("chart", "heat")]
    assert len(charts) == 6
    assert all(found["role"] == "img" and found["aria-label"] for found in charts)
    decoration = [found for tag, found in reader.tags if tag == "svg" and found["class"] == "swatch"]
    assert all(found["aria-hidden"] == "true" for found in decoration)


def test_names_are_escaped_wherever_they_stand(tmp_path):
    hostile = '"><script>alert(1)</script>'
    curves = {("linear", name, seed): curve(2.0, 1.0) for name in ("uniform", hostile) for seed in (0, 1)}
    failure = Failure(f"because {hostile}", 3, f"log {hostile}")
    made = compared(curves, folder=tmp_path, failures={("linear", hostile, 2): failure})
    plan = replace(made.plan, name=hostile, command=(hostile,))
    page = render(Subject(replace(made, plan=plan)))
    assert "<script>alert" not in page
    assert page.count("<script") == 2
    assert hostile in Reader(page).words
    assert f"log {hostile}" in Reader(page).words


def found(values, seeds=3, **settings):
    """The lead of a comparison in which seeds differ by a little."""
    curves = {
        ("linear", name, seed): curve(value * (1 + 0.01 * seed * (1 + (name == "uniform"))))
        for name, value in values.items()
        for seed in range(seeds)
    }
    return lead(Subject(compared(curves, **settings)), "linear")


def test_the_large_number_is_the_best_method_and_claims_no_more_than_the_seeds_allow():
    three = found({"uniform": 2.0, "bad": 3.0, "good": 1.0})
    assert (three.number, three.method.name, three.shown) == ("0.50×", "good", True)
    assert [(method.name, verdict) for method, _, verdict in three.others] == [("bad", "worse")]
    for seeds in (1, 2):
        few = found({"uniform": 2.0, "good": 1.0}, seeds=seeds)
        assert (few.number, few.shown) == ("0.50×", False)
    failed = found({"uniform": 2.0, "good": 1.0}, failures={("linear", "good", 3): "diverged"})
    assert not failed.shown
    assert "failed" in failed.sure
    assert found({"uniform": 2.0}).number == ""


def test_one_seed_is_a_demonstration_and_a_tie_is_no_win():
    assert "tie" not in found({"uniform": 2.0, "good": 1.0}, seeds=1).sure
    tie = found({"uniform": 264.168, "other": 264.166}, seeds=1)
    assert "tie" in tie.sure
    assert "demonstration" in tie.sure
    assert not tie.shown
    assert "uniform itself" in found({"uniform": 1.0, "other": 2.0}, seeds=1, metric=None).sure


def test_each_schedule_has_a_number_of_its_own():
    values = {"linear": 1.0, "cosine": 4.0}
    curves = {(process, "uniform", 0): curve(2.0) for process in values}
    subject = Subject(compared(curves | {(process, "other", 0): curve(value) for process, value in values.items()}))
    assert [lead(subject, process).number for process in values] == ["0.50×", "2.00×"]


def test_the_title_names_methods_and_data():
    assert title(Subject(compared({("linear", name, 0): curve(1.0) for name in ("uniform", "minsnr")}))).startswith(
        "uniform and minsnr on "
    )
    many = {("linear", name, 0): curve(1.0) for name in ("uniform", *(f"speed:k={k}" for k in range(2, 9)))}
    assert title(Subject(compared(many))).startswith("8 methods on ")


def test_the_facts_name_every_machine_and_the_size_of_the_fid(tmp_path):
    made = planted(tmp_path, two_seeds())
    text = " ".join(Reader(write_report(tmp_path).read_text()).words)
    assert "planted, 1 thread" in text
    assert "FID is of 100 generated images, and so higher than a published one of 50,000" in text
    other = json.dumps({**MACHINE, "machine": "elsewhere", "threads": 8})
    (made.outcomes[-1].folder / "environment.jsonl").write_text(other + "\n")
    assert "planted, 1 thread; elsewhere, 8 threads" in " ".join(Reader(write_report(tmp_path).read_text()).words)


def test_a_headline_is_what_can_be_compared_with_papers(tmp_path):
    planted(tmp_path, two_seeds(), headline=50_000)
    text = " ".join(Reader(write_report(tmp_path).read_text()).words)
    assert "100 images each, 50,000 at the end" in text
    assert "methods can be compared here, with papers by the FID of 50,000 in the table" in text


def test_a_headline_that_was_asked_for_and_not_measured_is_nowhere(tmp_path):
    planted(tmp_path, two_seeds(), metric=None, headline=50_000)
    text = " ".join(Reader(write_report(tmp_path).read_text()).words)
    assert "of 50,000" not in text


def test_failed_and_unfinished_runs_are_named_with_their_reason(tmp_path):
    curves = two_seeds()
    curves["linear", "p2", 1] = curve(1.0, 2.0)[:1]
    failures = {("linear", "p2", 0): Failure("the loss is not finite", 12, "step 11\nstep 12: nan")}
    planted(tmp_path, curves, failures=failures)
    text = " ".join(Reader(write_report(tmp_path).read_text()).words)
    assert "failed at step 12: the loss is not finite." in text
    assert "step 12: nan" in text
    assert "1 of 6 runs is not finished" in text


def test_a_comparison_without_distances_or_pictures_is_reported_by_its_loss(tmp_path):
    made = planted(tmp_path, two_seeds(), metric=None)
    for run in made.outcomes:
        for picture in (run.folder / "samples").iterdir():
            picture.unlink()
    page = write_report(tmp_path).read_text()
    assert 'class="samples"' not in page
    assert "held-out loss (lower is better)" in page
    assert "FID" not in " ".join(Reader(page).words)


def test_one_run_has_a_report_of_its_own(tmp_path):
    run = planted(tmp_path, two_seeds()).outcomes[2]
    measured = {"kind": "evaluation", "target": "run", "step": 1000, "images": 500, "fid": 12.345678, "heldout": {"loss": 0.25}}
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(measured) + "\n")
    reader = Reader(write_report(run.folder).read_text())
    assert reader.sections() == ["first", "measured", "density", "loss", "training", "quality", "settings"]
    cells = {found["data-name"]: found["data-value"] for tag, found in reader.tags if tag == "td" and "data-name" in found}
    assert (cells["fid"], cells["held-out loss"], cells["images"]) == ("12.345678", "0.25", "500")
    text = " ".join(reader.words)
    assert "Trained for 1,000 steps in 10 s" in text
    assert "Last measured: FID 12.35, held-out loss 0.25." in text


def test_a_run_that_was_never_measured_shows_its_training_and_its_samples(tmp_path):
    run = planted(tmp_path, {("cosine", "uniform", 0): curve(2.0)}).outcomes[0]
    rewrite(run.folder, lambda row: None if "kind" in row else row)
    reader = Reader(write_report(run.folder, tmp_path / "elsewhere" / "run.html").read_text())
    assert reader.sections() == ["first", "density", "training", "settings"]
    assert "step 1,000" in reader.words


@pytest.mark.parametrize("key", ["density_by_level", "objective_by_level", "loss_by_level"])
def test_rows_of_an_older_version_leave_out_what_they_do_not_have(tmp_path, key):
    run = planted(tmp_path, {("linear", "uniform", 0): curve(2.0)}).outcomes[0]
    rewrite(run.folder, lambda row: {name: value for name, value in row.items() if name != key})
    page = write_report(run.folder).read_text()
    assert ('class="heat"' in page) == (key != "density_by_level")
    assert ('class="objective"' in page) == (key == "loss_by_level")
    assert ("Training loss by noise level" in page) == (key != "loss_by_level")


def test_losses_that_are_not_finite_are_left_out_of_the_charts(tmp_path):
    run = planted(tmp_path, {("linear", "uniform", 0): curve(2.0)}).outcomes[0]
    bad = {"loss": float("nan"), "loss_by_level": [float("inf")] * 10}
    rewrite(run.folder, lambda row: row | bad if row["step"] == 125 else row)
    page = write_report(run.folder).read_text()
    assert "Training loss by noise level" in page
    assert "nan" not in page


def test_pictures_that_cannot_be_read_or_lie_elsewhere_are_left_out(tmp_path):
    made = planted(tmp_path / "made", two_seeds())
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "made" / "secret.png")
    torn, stray = made.outcomes[0], made.outcomes[1]
    (torn.folder / torn.evaluations[0].picture).write_bytes(b"\x89PNG")
    text = (stray.folder / "metrics.jsonl").read_text()
    (stray.folder / "metrics.jsonl").write_text(text.replace(stray.evaluations[0].picture, "../../secret.png"))
    page = write_report(tmp_path / "made").read_text()
    assert len([found for tag, found in Reader(page).tags if tag == "img"]) == 8 - 2


def run_of(*rows, **files):
    """What makes a run's folder with these rows of metrics, and other files."""

    def make(folder):
        folder.mkdir()
        lines = "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
        for name, text in {"config.yaml": as_yaml(tiny()), "metrics.jsonl": lines, **files}.items():
            (folder / name).write_text(text)

    return make


def plan_of(*runs, change=("", "")):
    """What makes a comparison of these runs, and then changes its file."""

    def make(folder):
        Plan("name", "uniform", "10it", (1.0,), 10, runs).write(folder)
        (folder / "comparison.json").write_text((folder / "comparison.json").read_text().replace(*change))

    return make


EVALUATION = {"kind": "evaluation", "share": 1.0, "step": 1, "seconds": 1.0, "images": 2, "metric": "fid", "distance": None}
BAD = {
    "no folder": (lambda folder: None, "is no folder"),
    "nothing": (lambda folder: folder.mkdir(), "neither a comparison"),
    "no rows": (run_of(), "the run has not written metrics"),
    "other settings": (run_of(**{"config.yaml": "future: 1\n"}), "another version of noisewise"),
    "other rows": (run_of({"kind": "evaluation", "share": 1.0, "score": 3}), "another version of noisewise"),
    "a line that is no row": (run_of("[1, 2]\n"), "metrics.jsonl cannot be read"),
    "a row without a step": (run_of({"loss": 1.0}), "metrics.jsonl cannot be read"),
    "an evaluation of nothing": (run_of({**EVALUATION, "held_out": []}), "metrics.jsonl cannot be read"),
    "a distance in words": (run_of({**EVALUATION, "distance": "far", "held_out": [1.0]}), "its distance is 'far'"),
    "a torn failure": (run_of(**{"failure.json": '{"message": '}), "failure.json cannot be read"),
    "a budget that is a number": (plan_of("a", change=('"10it"', "10")), "its budget is 10"),
    "another format": (plan_of("a", change=('"format": 1', '"format": 99')), "this version of noisewise reads 1"),
    "no runs": (plan_of(), "is an empty comparison"),
    "none begun": (plan_of("a", "b"), "none of its 2 runs has begun"),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD)
def test_bad_input_gets_a_clear_message_and_leaves_the_old_report(tmp_path, make, message, capsys):
    folder, out = tmp_path / "given", tmp_path / "report.html"
    make(folder)
    out.write_text("the old one")
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["report", str(folder), "--out", str(out), "--figures", str(tmp_path / "figures")]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert out.read_text() == "the old one"
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command_says_where_it_wrote_and_what_it_does_not_know(tmp_path, capsys):
    planted(tmp_path / "made", {("linear", "uniform", 0): curve(2.0)})
    assert cli.main(["report", str(tmp_path / "made")]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'made' / 'report.html'}\n"
    assert cli.main(["report", str(tmp_path / "made"), "--formats", "gif"]) == 1
    assert "choose from png, svg, pdf" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path / "made"), "--out", str(tmp_path)]) == 1
    assert "name the HTML file" in capsys.readouterr().err
    for option, place in (("--out", "/proc/x.html"), ("--figures", "/proc/x")):
        assert cli.main(["report", str(tmp_path / "made"), option, place]) == 1
        assert f"{option} {place} cannot be written: /proc does not take it (" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path / "made"), "--live", "--figures", "x"]) == 1
    assert "--live writes no files" in capsys.readouterr().err


def test_it_can_be_repeated_from_what_is_written():
    made = compared({("linear", "uniform", 0): curve(1.0), ("cosine", "adaptive", 0): curve(1.0)})
    subject = Subject(replace(made, plan=replace(made.plan, command=("--samplers", "uniform,adaptive:every=2"))))
    assert command(subject) == "noisewise compare --samplers uniform,adaptive:every=2"
    commands = {"earlier": (("compare", "--seeds", "2"),), "command": ("analyze", "ablate", "--setting", "floor")}
    several = Subject(replace(made, plan=replace(made.plan, **commands)))
    assert command(several) == "noisewise compare --seeds 2\nnoisewise analyze ablate --setting floor"
    assert command(Subject(replace(made, plan=replace(made.plan, command=())))) == ""
    assert differences(subject) == "process: cosine\nsampler: adaptive"


def test_a_large_comparison_stays_small(tmp_path):
    names = ["uniform", *(f"adaptive:every={k}" for k in range(2, 13))]
    points = curve(9.0, 5.0, 3.0, 2.0, steps=200_000, seconds=9000.0)
    curves = {(process, name, seed): points for process in ("linear", "cosine", "vp") for name in names for seed in range(3)}
    made = compared(curves, folder=tmp_path)
    generator = np.random.default_rng(0)
    grids = []
    for i in range(4):  # like CIFAR-10: noise does not compress
        grids.append(tmp_path / f"{i}.png")
        pixels = np.full((8 * 33 + 1, 8 * 33 + 1, 3), 255, np.uint8)
        smooth, noise = generator.integers(0, 255, (64, 8, 8, 3)), generator.integers(-9, 9, (64, 32, 32, 3))
        for k, image in enumerate((smooth.repeat(4, 1).repeat(4, 2) + noise).clip(0, 255)):
            top, left = 33 * (k // 8) + 1, 33 * (k % 8) + 1
            pixels[top : top + 32, left : left + 32] = image
        Image.fromarray(pixels).save(grids[-1])
    density = generator.gamma(4, 0.25, (40, 50)).round(3).tolist()
    rows = [{"step": k, "seconds": 4.5 * k, "density_by_level": density[k % 40]} for k in range(1, 601)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pictures = [replace(found, picture=f"samples/{i}.png") for i, found in enumerate(evaluations(points))]
    for run in made.outcomes:
        (run.folder / "samples").mkdir(parents=True)
        (run.folder / "metrics.jsonl").hardlink_to(tmp_path / "metrics.jsonl")
        for path in grids:
            (run.folder / "samples" / path.name).hardlink_to(path)
    outcomes = [replace(run, evaluations=pictures) for run in made.outcomes]
    page = render(Subject(replace(made, outcomes=outcomes)))
    assert len(page.encode()) < LIMIT
    reader = Reader(page)
    maps = [found["href"].partition(",")[2] for tag, found in reader.tags if tag == "image"]
    heights = [Image.open(io.BytesIO(base64.b64decode(picture))).height for picture in maps]
    assert heights == [120] * 36
    assert len([found for tag, found in reader.tags if tag == "img"]) == 12 * 3 * 4  # one seed, all moments


def test_a_picture_whose_evaluation_lacks_the_distance_claims_none(tmp_path):
    """Its held-out loss must not stand under the name of the distance that the others have."""
    planted(tmp_path, {("linear", "uniform", 0): [(0.5, 10, 1.0, 4.0), (1.0, 20, 2.0, 2.0)]})
    run = next(tmp_path.glob("runs/*"))
    rewrite(run, lambda row: row | {"metric": None, "distance": None} if row.get("share") == 0.5 else row)
    assert [picture.value for picture in pictures_of(read_subject(tmp_path))] == [None, 2.0]
