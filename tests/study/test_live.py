"""The live view: what it says of runs in all states, from their folders alone."""

import io
import json
from pathlib import Path

from rich.console import Console

from noisewise.study.job import Status, forget_status
from noisewise.study.live import Board, Tail
from noisewise.study.outcome import Failure, write_failure
from tests.study.fateful import jobs_in

ROW = {"samples": 16, "steps_per_second": 10.0, "loss": 0.25, "skipped": 0}
ROW |= {"loss_by_level": [1.0] * 10, "density_by_level": [1.0] * 50, "objective_by_level": [1.0] * 50}


def board_of(jobs, **console):
    said = io.StringIO()
    return Board([job.config for job in jobs], Console(file=said, width=160, **console)), said


def trained(job, step, *rows):
    job.folder.mkdir(parents=True, exist_ok=True)
    made = [{"step": step, "seconds": step / 10, **ROW}, *rows]
    with (job.folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in made))


def evaluated(share, distance):
    return {"kind": "evaluation", "share": share, "step": int(share * 100), "seconds": share * 10, "distance": distance}


def shown(board, said):
    said.truncate(0)
    board.display.console.print(board.drawn())
    return said.getvalue()


def test_every_state_has_its_words(tmp_path):
    jobs = jobs_in(tmp_path, ["uniform", "minsnr", "p2", "vlb"], budget="100it")
    trained(jobs[0], 100, evaluated(1, 3.25))
    trained(jobs[1], 40)
    Status("training", 50, 5.0).write(jobs[1].folder)
    write_failure(jobs[2].folder, jobs[2].config, Failure("out of memory: 8 GiB", 10))
    board, said = board_of(jobs)
    lines = {line.split()[1]: line for line in shown(board, said).splitlines() if line.strip().startswith("linear")}
    assert "finished" in lines["uniform"]
    assert "3.25" in lines["uniform"]
    assert "training" in lines["minsnr"]
    assert " 50 " in lines["minsnr"]
    assert "0.2500" in lines["minsnr"]
    assert "failed: out of memory" in lines["p2"]
    assert "waiting" in lines["vlb"]
    assert "38% trained" in said.getvalue()
    assert " left" not in said.getvalue(), "nothing has been seen to move yet"


def test_the_time_left_is_that_of_the_wall_whatever_goes_on_at_once(tmp_path):
    jobs = jobs_in(tmp_path, ["uniform", "minsnr", "p2", "vlb"], budget="100it")
    now = [0.0]
    board = Board([job.config for job in jobs], Console(file=io.StringIO()), now=lambda: now[0])
    for job in jobs:
        trained(job, 10)  # by an earlier command
    assert board.look() == "10% trained"
    now[0] = 50.0  # programs start and compile
    for job in jobs:
        trained(job, 20)
    assert board.look() == "20% trained"
    now[0] = 60.0
    for job in jobs:
        trained(job, 40)
    assert board.look() == "40% trained, about 0:30 left"
    write_failure(jobs[0].folder, jobs[0].config, Failure("no memory", 40))
    trained(jobs[1], 80)
    now[0] = 80.0  # of four runs 1.2 have been trained since 50, and 1.4 are left
    assert board.look() == "50% trained, about 0:30 left", "and it never counts up"
    for job in jobs[1:]:
        trained(job, 100)
    assert board.look() == "85% trained", "an evaluation at the end is not known beforehand"


def test_outside_a_terminal_each_tenth_and_each_failure_is_said_once(tmp_path):
    (job, other) = jobs_in(tmp_path, ["uniform", "minsnr"], budget="100it")
    board, said = board_of([job, other])
    board.tick()
    for step in (20, 21, 22, 40):
        trained(job, step)
        board.tick()
    write_failure(other.folder, other.config, Failure("its process was killed by SIGKILL", 3))
    board.tick()
    board.tick()
    lines = said.getvalue().splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["0%", "10%", "20%", "failed:"]
    assert lines[-1] == "failed: linear, minsnr, seed 0: its process was killed by SIGKILL"


def test_a_short_terminal_shows_what_is_not_finished(tmp_path):
    jobs = jobs_in(tmp_path, seeds=12, budget="100it")
    for job in jobs[:9]:
        trained(job, 100, evaluated(1, 3.0))
    Status("evaluating", 50, 5.0).write(jobs_folder(jobs[10]))
    board, said = board_of(jobs, height=8)
    text = shown(board, said)
    assert "evaluating" in text
    assert text.count("waiting") == 2
    assert "finished" not in text
    assert "and 9 more" in text


def jobs_folder(job):
    job.folder.mkdir(parents=True, exist_ok=True)
    return job.folder


def test_rows_are_read_once_and_again_when_the_file_was_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.rows() == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [row["step"] for row in tail.rows()] == [1, 2]
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert [row["step"] for row in tail.rows()] == [3]
    assert tail.rows() == []
    path.write_text('{"step": 1}\n')
    assert [row["step"] for row in tail.rows()] == [1]


def test_a_file_that_is_gone_between_two_looks_at_it_has_no_new_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda self: True)
    assert Tail(tmp_path / "metrics.jsonl").rows() == []


def test_a_status_that_is_gone_or_torn_is_none(tmp_path):
    assert Status.read(tmp_path) is None
    Status("waiting", 3, 0.5).write(tmp_path)
    assert Status.read(tmp_path) == Status("waiting", 3, 0.5)
    (tmp_path / "status.json").write_text('{"state": ')
    assert Status.read(tmp_path) is None
    forget_status(tmp_path)
    forget_status(tmp_path)
    assert list(tmp_path.iterdir()) == []
