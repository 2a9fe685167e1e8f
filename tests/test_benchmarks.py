"""The parts of benchmarks/ whose mistakes would not show in their output."""

import argparse
import importlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import noisewise
from noisewise import DDPM, PROCESSES, SAMPLERS, WEIGHTINGS, Objective
from noisewise.commands.cli import main
from noisewise.report.page import write_report
from noisewise.spec import SpecError
from noisewise.study.job import with_budget
from noisewise.study.outcome import Evaluation, read_comparison
from noisewise.study.summary import summarise
from noisewise.training.config import EMAConfig
from noisewise.training.options import load_preset
from noisewise.training.run import Run
from tests.study.made import curve, planted
from tests.training.tiny import DIT, tiny

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    """Imports a script as if it were run from its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module


# throughput -------------------------------------------------------------------------------------------------------------


def test_a_path_that_there_is_not_is_refused_before_anything_is_measured(benchmark, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["throughput.py", "--paths", "fast;fsat"])
    with pytest.raises(SystemExit):
        benchmark("throughput").main()
    assert "unknown path 'fsat': choose from script, fp32; " in capsys.readouterr().err


def test_a_process_that_waits_for_its_turn_ends_when_nobody_is_left_to_give_it(benchmark, monkeypatch, tmp_path):
    throughput, made = benchmark("throughput"), []
    monkeypatch.setattr(throughput, "import_all", lambda: None)
    monkeypatch.setattr(throughput, "ours", lambda *_: (lambda: made.append(1), torch.nn.Linear(1, 1)))
    args = argparse.Namespace(device="cpu", gate=tmp_path / "0", launcher=-1)
    with pytest.raises(SystemExit, match="is gone"):
        throughput.measure(args, "tiny", "fast")
    assert (tmp_path / "0.ready").exists()
    assert len(made) == 1  # none of the steps that are timed


@pytest.mark.parametrize("settings", [{}, {"classes": 0}, {"final_conv": True, "time_mlp": True}])
def test_operations_of_a_transformer_are_those_that_torch_counts(benchmark, settings):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from noisewise.models import DiT, UViT

    for kind in (DiT, UViT):
        more = {name: value for name, value in settings.items() if name == "classes" or kind is UViT}
        network = kind((4, 8, 8), **{"classes": 7, "width": 32, "depth": 3, "heads": 4, **more})
        x, time = torch.zeros(1, 4, 8, 8, requires_grad=True), torch.zeros(1)
        with FlopCounterMode(display=False) as forward, sdpa_kernel(SDPBackend.MATH):  # the products of others go uncounted
            network(x, time)
        assert benchmark("throughput").transformer_operations(network) == 3 * forward.get_total_flops()


def test_large_models_get_ready_one_after_another(benchmark):
    groups, wanted = benchmark("throughput").groups, [("a", "x"), ("a", "y"), ("b", "x")]
    assert groups(wanted, 0) == [wanted]
    assert groups(wanted, 2) == [wanted[:2], wanted[2:]]
    assert groups([], 0) == []


# strata -----------------------------------------------------------------------------------------------------------------


def test_half_of_the_mass_goes_to_one_stratum_and_the_other_half_everywhere(benchmark):
    sampler = benchmark("strata").sampler_of(DDPM.linear(), 3, strata=10, share=0.5, seed=0)
    u = (torch.arange(1000) + 0.5) / 1000
    inside = (u >= 0.3) & (u < 0.4)
    torch.testing.assert_close(sampler.density(u), torch.where(inside, 5.5, 0.5))
    draw = sampler.sample(4000)
    assert bool((draw.weight == 1).all())
    assert abs(float(((draw.u >= 0.3) & (draw.u < 0.4)).float().mean()) - 0.55) < 0.03


def test_branches_of_one_seed_turn_the_same_uniform_numbers_into_draws(benchmark):
    make = benchmark("strata").sampler_of
    uniform, stratum = (make(DDPM.linear(), k, 4, 0.5, seed=7) for k in (None, 0))
    v, u = uniform.sample(500).u, stratum.sample(500).u
    torch.testing.assert_close(u, stratum.quantile(v))


@pytest.fixture
def started(tmp_path):
    """A run at its end."""
    run = Run(tiny(steps=6, out=str(tmp_path / "start"), ema=EMAConfig(decay=0.9, ramp=True)))
    for _ in run.advance():
        pass
    yield run
    run.close()


def test_uniform_with_the_first_seed_is_how_training_goes_on_and_a_branch_leaves_no_trace(benchmark, started):
    strata, trainer = benchmark("strata"), started.trainer
    args = argparse.Namespace(
        branch_steps=strata.MEMORY, strata=4, share=0.5, images=8, held_out_images=8, also="ddpm:steps=3", also_images=8
    )
    before = strata.digest(trainer)
    rows = {name: strata.branch(started, args, name, 0) for name in ("uniform", "stratum 0", "start, average")}
    assert strata.digest(trainer) == before
    assert strata.branch(started, args, "uniform", 0)["held_out"] == rows["uniform"]["held_out"]
    assert strata.branch(started, args, "uniform", 1)["held_out"] != rows["uniform"]["held_out"]
    assert rows["start, average"]["held_out"] == strata.measure(started, 8, 8)["held_out"]
    for _ in range(args.branch_steps):
        trainer.training_step()
    trainer.ema.blend(1.0)  # the average of so short a branch is its last weights
    expected = strata.measure(started, 8, 8)
    assert (rows["uniform"]["held_out"], rows["uniform"]["distance"]) == (expected["held_out"], expected["distance"])
    assert rows["stratum 0"]["held_out"] != expected["held_out"]
    assert rows["uniform"]["also_distance"] not in (rows["uniform"]["distance"], rows["stratum 0"]["also_distance"])


def branch_row(branch, seed, distance, **targets):
    stratum = int(branch.split()[1]) if branch.startswith("stratum") else None
    return {"branch": branch, "seed": seed, "stratum": stratum, "distance": distance, "targets": targets}


def test_gains_are_against_uniform_with_the_same_seed_and_averaged_over_seeds(benchmark):
    rows = [
        branch_row("uniform", 0, 50.0, plain=1.0),
        branch_row("uniform", 1, 80.0, plain=2.0),
        branch_row("stratum 2", 0, 25.0, plain=1.0),
        branch_row("stratum 2", 1, 80.0, plain=1.0),
        branch_row("start, average", 0, 99.0, plain=9.0),
    ]
    assert benchmark("strata").gains(rows) == {2: {"distance": math.log(2) / 2, "plain": math.log(2) / 2}}


def test_the_target_that_orders_strata_as_pictures_do_is_found(benchmark):
    strata = benchmark("strata")
    rows = [branch_row("uniform", 0, 50.0, good=1.0, bad=1.0)]
    rows += [branch_row(f"stratum {k}", 0, 40.0 + 5 * k, good=0.9 + k**3, bad=2.0 - k / 9) for k in range(5)]
    assert strata.correlations(strata.gains(rows)) == pytest.approx({"good": 1.0, "bad": -1.0})
    assert "1.00" in strata.table(rows, 5).splitlines()[-1]


def test_a_plan_that_is_cut_short_has_the_noise_and_whole_sets_of_strata_first(benchmark):
    plan = list(benchmark("strata").plan(strata=2, seeds=3, stratum_seeds=2))
    assert [name for name, _ in plan[:5]] == ["start, average", "start, last weights", *["uniform"] * 3]
    assert plan[5:] == [("stratum 0", 0), ("stratum 1", 0), ("stratum 0", 1), ("stratum 1", 1)]


# field ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["linear", "cosine", "quadratic"])
def test_every_method_of_the_field_builds(benchmark, schedule):
    methods = benchmark("field").METHODS
    for spec in methods.values():
        noisewise.recipe(spec, PROCESSES[schedule]())
    assert len(set(methods.values())) == len(methods)


def test_a_name_of_the_field_never_hides_a_spec_that_means_something_else(benchmark):
    field = benchmark("field")
    hidden = {name for name in field.METHODS if name in {*SAMPLERS, *WEIGHTINGS}}
    assert all(field.METHODS[name] == name for name in hidden)
    assert field.chosen("min-snr,adaptive:floor=0.5,every=20") == {
        "min-snr": "minsnr:gamma=5",
        "adaptive:floor=0.5,every=20": "adaptive:floor=0.5,every=20",
    }
    with pytest.raises(SpecError, match="did you mean"):
        noisewise.recipe(field.chosen("min_snr")["min_snr"], DDPM.linear())


def test_rows_are_collected_once_and_say_what_was_drawn_and_what_failed(benchmark, tmp_path):
    field = benchmark("field")
    made = planted(
        tmp_path / "out",
        {("linear", "logit_normal", 0): curve(60.0, 40.0)},
        failures={("linear", "p2", 0): "no file /data/x.npz"},
    )
    configs = [outcome.config for outcome in made.outcomes]
    args = argparse.Namespace(out=tmp_path / "out", json=tmp_path / "rows.jsonl", images=100, workers=3)
    names = {"logit_normal": "log-normal", "p2": "p2"}
    for _ in range(2):  # the second finds nothing new
        known = [json.loads(line) for line in args.json.read_text().splitlines()] if args.json.exists() else []
        with field.Collector(configs, args, names, known):
            pass
    half, end, failed = [json.loads(line) for line in args.json.read_text().splitlines()]
    assert [(row["method"], row["share"], row["distance"]) for row in (half, end)] == [
        ("log-normal", 0.5, 60.0),
        ("log-normal", 1.0, 40.0),
    ]
    assert half["density_by_level"][0] < end["density_by_level"][0]  # of its own time
    assert end["steps_per_second"] == 100.0
    assert (failed["method"], failed["failed"]) == ("p2", "no file x.npz")
    assert field.key(end) == field.key(field.about(configs[0], 100))
    assert field.key(failed) != field.key(end)
    older = {name: value for name, value in end["config"].items() if name != "sigma_data"}  # there was no such setting once
    assert field.key({**end, "config": older, "settings": "of then"}) == field.key(end)
    assert field.key({**end, "config": {**end["config"], "batch": 7}}) != field.key(end)
    assert field.key({**end, "config": {**end["config"], "optimizer": {**older["optimizer"], "lr": 0.1}}}) != field.key(end)


def test_runs_of_earlier_files_are_not_made_again_unless_they_lack_the_headline(benchmark, tmp_path, monkeypatch, capsys):
    field = benchmark("field")
    begun = []
    monkeypatch.setattr(field, "conduct", lambda plan, configs, *more, **settings: begun.append((plan.headline, len(configs))))
    config = replace(with_budget(load_preset("digits"), "20it"), sampler="uniform", seed=0)
    done = tmp_path / "done.jsonl"
    measured = {"method": "uniform", "session": "earlier", "share": 1.0, "distance": 9.0, "headline_images": 64}
    done.write_text(json.dumps({**field.about(config, 32), **measured}) + "\n")
    options = ["field.py", "--preset", "digits", "--steps", "20", "--images", "32", "--seeds", "0", "--methods", "uniform"]
    for headline, makes in (([], []), (["--headline", "64"], []), (["--headline", "99"], [(99, 1)])):
        monkeypatch.setattr("sys.argv", [*options, "--done", str(done), "--out", str(tmp_path / "out"), *headline])
        field.main()
        assert f"1 run, {1 - len(makes)} of them in the files already" in capsys.readouterr().out
        assert begun == makes


def test_published_rows_name_no_places_and_hold_no_nan(benchmark):
    row = {"a": ["--out", "/somewhere/else/name", "--json=/there/x.jsonl", "data/cifar10"], "b": {"c": (1.5, math.nan)}}
    assert benchmark("rows").publishable(row) == {
        "a": ["--out", "name", "--json=x.jsonl", "data/cifar10"],
        "b": {"c": [1.5, None]},
    }
    log = """File "/somewhere/lib/run.py", line 3: [Errno 2] '/data/x y' and/or 1/2 of https://site.org/a/b"""
    assert benchmark("rows").publishable(log) == log.replace("/somewhere/lib/", "").replace("/data/", "")


def test_old_rows_are_named_as_their_specs_are_written_now(benchmark):
    spec_now = benchmark("rows").spec_now
    oldest, old, new = "2026-11-16T08:28:33+00:00", "2026-11-16T09:30:00+00:00", "2026-11-17T00:00:00+00:00"
    strata, exact = "2026-11-16T12:30:00+00:00", "2026-11-18T03:00:00+00:00"
    for session, spec, expected in [
        (oldest, "adaptive", "adaptive:draws=independent,floor=0.2+none"),
        (oldest, "adaptive+minsnr:gamma=5", "adaptive:draws=independent,floor=0.2+minsnr:gamma=5"),
        (
            oldest,
            "adaptive:target=(vlb+minsnr),correction=none",
            "adaptive:correction=none,draws=independent,floor=0.2,target=(vlb+minsnr)",
        ),
        (old, "adaptive", "adaptive:draws=independent,floor=0.2"),
        (old, "adaptive:draws=stratified,floor=0.1", "adaptive:floor=0.1"),
        (old, "loss_adaptive+p2", "loss_adaptive+p2"),
        (strata, "adaptive", "adaptive:floor=0.2"),
        (strata, "adaptive:floor=0.35", "adaptive"),
        (
            strata,
            "switch:first=(adaptive:target=(bell:scale=1)),then=adaptive,at=600",
            "switch:first=(adaptive:floor=0.2,target=(bell:scale=1)),then=(adaptive:floor=0.2),at=600",
        ),
        (new, "adaptive:estimator=loss", "adaptive"),
        (new, "adaptive", "adaptive"),
        (new, "mix:of=(logit_normal),correction=clipped(5)", "mix:of=(logit_normal),correction=clipped(5)"),
        (new, "adaptive:correction=clipped(5)", "adaptive:correction=clipped(5)"),
        (new, "switch:first=uniform,then=adaptive,at=600", "switch:first=uniform,then=adaptive,at=600"),
        (
            new,
            "paper_cifar10:floor=0.2+minsnr",
            "adaptive:draws=independent,estimator=reinforce,floor=0.2,normalise=false,strata=1000,target=vlb+minsnr",
        ),
        (new, "speed:k=5,tau=700,mirror=true", "speed:k=5,tau=700,mirror=at_700"),
        (new, "speed:k=5", "speed:k=5"),
        (exact, "paper_cifar10", "paper_cifar10"),
        (exact, "speed:k=5,tau=700,mirror=true", "speed:k=5,tau=700,mirror=true"),
    ]:
        assert spec_now({"session": session, "sampler": spec}) == expected
    field = benchmark("field")
    assert field.key({"session": old, "sampler": "adaptive"}) != field.key({"sampler": "adaptive"})
    assert field.key({"session": old, "sampler": "adaptive:draws=stratified,floor=0.35"}) == field.key({"sampler": "adaptive"})
    # the order of settings does not matter
    assert field.key({"sampler": "adaptive:power=0.5,floor=0.1"}) == field.key({"sampler": "adaptive:floor=0.1,power=0.5"})


# rebuild ----------------------------------------------------------------------------------------------------------------


def test_runs_rebuilt_from_rows_are_those_that_the_rows_came_from(benchmark, tmp_path, monkeypatch):
    made = planted(
        tmp_path / "out",
        {("linear", "uniform", 0): curve(70.0, 50.0), ("linear", "logit_normal", 0): curve(60.0, 40.0)},
        failures={("linear", "p2", 0): "out of memory"},
        headline=500,
    )
    args = argparse.Namespace(out=tmp_path / "out", json=tmp_path / "rows.jsonl", images=100, workers=3)
    names = {name: name for name in ("uniform", "logit_normal", "p2")}
    with benchmark("field").Collector([outcome.config for outcome in made.outcomes], args, names, []):
        pass
    cut = {**json.loads(args.json.read_text().splitlines()[0]), "session": "a later one", "distance": 1.0}
    args.json.write_text(args.json.read_text() + json.dumps(cut) + "\n")  # of a session that did not get as far
    (end,) = [
        row
        for row in map(json.loads, args.json.read_text().splitlines())
        if (row["method"], row.get("share")) == ("uniform", 1)
    ]
    args.json.write_text(args.json.read_text() + json.dumps({**end, "session": "with fewer evaluations"}) + "\n")
    monkeypatch.setattr("sys.argv", ["rebuild.py", str(args.json), "--out", str(tmp_path / "again")])
    benchmark("rebuild").main()
    again = read_comparison(tmp_path / "again")
    assert (again.plan.evaluate_at, again.plan.images, again.plan.headline) == ((0.5, 1.0), 100, 500)
    assert [outcome.status for outcome in again.outcomes] == [outcome.status for outcome in made.outcomes]
    for old, new in zip(made.outcomes, again.outcomes, strict=True):
        assert (new.sampler, new.seed, new.failure and new.failure.message) == (
            old.sampler,
            old.seed,
            old.failure and old.failure.message,
        )
        assert [replace(one, picture=None) for one in old.evaluations] == new.evaluations
    assert write_report(tmp_path / "again", None).is_file()


def test_a_density_that_changes_is_kept_at_some_moments_before_an_evaluation(benchmark, tmp_path):
    field, rebuild = benchmark("field"), benchmark("rebuild")
    end = Evaluation(share=1.0, step=2500, seconds=25.0, images=64, metric="fid", distance=5.0, held_out=[1.0])

    def training(density):
        levels = {"objective_by_level": [1.0], "effective_share": 1.0}
        return [{"step": k, "seconds": k / 100, "density_by_level": density(k), **levels} for k in range(100, 2501, 100)]

    assert "through" not in field.evaluation_row(end, training(lambda step: [1.0]), 0)
    late = field.evaluation_row(end, training(lambda step: [float(step)]), 2500)
    assert (late["density_by_level"], "through" in late) == ([2500.0], False), "evaluated twice between two log points"
    row = field.evaluation_row(end, training(lambda step: [float(step)]), 0)
    assert [one["step"] for one in row["through"]] == list(range(300, 2401, 300))
    assert [one["density_by_level"][0] for one in row["through"]] == list(range(300, 2401, 300))
    assert row["density_by_level"] == [2500.0]
    timed = rebuild.timed(row, 0.5)
    assert [one["seconds"] for one in timed["through"]] == [one["step"] / 2 for one in row["through"]]
    run = {**row, "seed": 0, "sampler": "adaptive", "config": {"out": "one", "sampler": "adaptive"}, "environment": {}}
    rebuild.write_run(tmp_path, [run])
    lines = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    steps = [*range(300, 2401, 300), 2500]
    assert [(line["step"], line.get("kind")) for line in lines] == [*((k, None) for k in steps), (2500, "evaluation")]


def test_what_the_report_calls_better_in_the_confirmation(benchmark, tmp_path):
    rows = [json.loads(line) for line in (BENCHMARKS / "results" / "cifar10-v1-confirmation.jsonl").read_text().splitlines()]
    benchmark("rebuild").rebuild(rows, tmp_path / "runs")
    (found,) = [one for one in summarise(read_comparison(tmp_path / "runs")) if one.verdict == "better"]
    assert (found.process, found.sampler, len(found.seeds)) == ("cosine", "adaptive", 3)
    assert found.p_adjusted == pytest.approx(0.013, abs=5e-4)


def test_seconds_of_runs_that_shared_a_gpu_are_those_of_their_steps_alone(benchmark):
    rebuild = benchmark("rebuild")
    rows = [
        {"spec": "uniform", "ratio": 1.0, "steps_per_second": 100.0},
        {"spec": "adaptive", "ratio": 1.02, "steps_per_second": 98.0},
        {"spec": "paper_cifar10", "ratio": 1.2, "steps_per_second": 83.0},
        {"spec": "adaptive:estimator=reinforce", "ratio": 1.6, "steps_per_second": 62.0},
    ]
    cost = rebuild.Cost(rows)
    expected = {"uniform": 0.01, "minsnr:gamma=5": 0.01, "adaptive": 0.0102, "adaptive:floor=0.5+p2": 0.0102}
    expected |= {"paper_cifar10:normalise=true+minsnr": 0.012, "adaptive:estimator=reinforce,floor=0": 0.016}
    assert {spec: cost.step_seconds(spec) for spec in expected} == pytest.approx(expected)
    with pytest.raises(ValueError, match="no cost of logit_normal was measured"):
        cost.step_seconds("logit_normal")
    row = rebuild.timed({"step": 5000, "seconds": 300.0, "distance": 50.0}, 0.0102)
    assert row == {"step": 5000, "seconds": pytest.approx(51.0), "distance": 50.0, "steps_per_second": 98.039}


def test_the_cost_of_a_method_is_that_of_its_blocks_over_uniforms_of_the_same_round(benchmark, monkeypatch):
    method_cost = benchmark("method_cost")
    trainer = argparse.Namespace(objective=Objective(DDPM.linear()), device=torch.device("cpu"), network=None, optimizer=None)
    trainer.arithmetic = None
    monkeypatch.setattr(method_cost, "protocol_trainer", lambda *_: trainer)
    clocks, calls = iter([9.0, 9.0, 1.0, 1.1, 2.0, 2.1, 4.0, 4.4]), []

    def block(trainer, sampler, steps):
        calls.append((type(sampler).__name__, steps))
        return next(clocks)

    monkeypatch.setattr(method_cost, "block", block)
    args = argparse.Namespace(
        methods="min-snr,adaptive", device="cpu", channels=16, batch=8, rounds=3, steps=40, warm=7, limit=99
    )
    uniform, adaptive = method_cost.measure(args)
    assert calls == [("Uniform", 7), ("AdaptiveSampler", 7)] + 3 * [("Uniform", 40), ("AdaptiveSampler", 40)]
    assert (uniform["method"], uniform["ratio"], uniform["steps_per_second"]) == ("uniform", 1.0, 20.0)
    assert [adaptive[name] for name in ("method", "ratio", "lowest", "highest")] == ["adaptive", 1.1, 1.05, 1.1]


# results ----------------------------------------------------------------------------------------------------------------


def test_no_result_file_names_a_place_on_somebodys_machine():
    for path in (BENCHMARKS / "results").iterdir():
        assert not re.search(r"[\"' ,]/(home|root|work|tmp|Users)/", path.read_text()), path.name


def test_the_demo_was_one_comparison_of_whole_runs_at_equal_time():
    found = [json.loads(line) for line in (BENCHMARKS / "results" / "demo_digits.jsonl").read_text().splitlines()]
    alike = [[row["environment"], row["images"], row["evaluate_at"], row["budget"], row["metric"]] for row in found]
    assert all(one == alike[0] for one in alike)
    same = [{k: v for k, v in row["config"].items() if k not in ("sampler", "seed", "out")} for row in found]
    assert all(config == same[0] for config in same)
    for row in found:
        assert (row["status"], row["curve"][-1]["share"], row["curve"][-1]["distance"]) == ("finished", 1.0, row["distance"])
        assert abs(row["seconds"] - float(row["budget"].removesuffix("s"))) < 0.5


# reproduced -------------------------------------------------------------------------------------------------------------


def test_what_reproduce_found_is_gathered_anew_each_time(benchmark, monkeypatch, tmp_path):
    folder, results = tmp_path / "toy", tmp_path / "results"
    planted(folder / "linear", {("linear", "uniform", 0): curve(9.0, 8.0)})
    results.mkdir()
    (folder / "table1.json").write_text(json.dumps({"item": "table1", "found": "/somewhere/else/page"}))
    monkeypatch.setattr("sys.argv", ["reproduced.py", str(folder), "--results", str(results)])
    for _ in range(2):
        benchmark("reproduced").main()
    (row,) = [json.loads(line) for line in (results / "reproduce_toy.jsonl").read_text().splitlines()]
    assert (row["item"], row["found"], row["environment"]["machine"]) == ("table1", "page", "planted")
    lines = (results / "reproduce_toy.csv").read_text().splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("linear,uniform,")


# finetune ---------------------------------------------------------------------------------------------------------------


def test_adapters_change_nothing_at_first_and_are_all_that_is_trained(benchmark):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 2))
    x, before = torch.randn(3, 1, 8, 8), {name: value.clone() for name, value in model.state_dict().items()}
    outputs = model(x)
    parameters = benchmark("finetune").adapt(model, rank=2)
    assert torch.equal(model(x), outputs)
    assert [tuple(one.shape) for one in parameters] == [(2, 9), (4, 2), (2, 144), (2, 2)]
    (model(x) ** 2).sum().backward()
    torch.optim.SGD(parameters, lr=0.1).step()
    assert not torch.equal(model(x), outputs)
    assert torch.equal(model[0].parametrizations.weight.original, before["0.weight"])
    assert torch.equal(model[0].bias, before["0.bias"])


@pytest.mark.slow
def test_a_fine_tune_writes_a_row_for_every_method_and_mark(benchmark, tmp_path, monkeypatch):
    finetune, file = benchmark("finetune"), tmp_path / "rows.jsonl"
    words = f"--base {tmp_path}/base.pt --base-steps 1 --marks 1 --seeds 3 --count 40 --json {file}"
    monkeypatch.setattr("sys.argv", ["finetune.py", *words.split()])
    monkeypatch.setattr(finetune, "LEVELS", 3)
    monkeypatch.setattr(finetune, "METHODS", {"uniform": "uniform", "adaptive": "adaptive"})
    finetune.main()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["method"], row["step"]) for row in rows] == [(name, 1) for name in finetune.METHODS]
    assert all(len(row["loss"]) == 3 and row["distance"] > 0 for row in rows)
    assert len(finetune.images_of("all", [3, 8])) == 183 + 174


def test_the_half_hour_run_goes_on_where_it_was_stopped(benchmark, tmp_path, monkeypatch, capsys):
    """A first sitting that ends at once, and a second that ends: as many steps as planned, with a cool-down, one row each."""
    words = ["speedrun.py", "--preset", "digits", "--minutes", "0.02", "--images", "16", "--samplers", "uniform"]
    words += ["--out", str(tmp_path / "runs"), "--json", str(tmp_path / "rows.jsonl"), "--batch=8", "--device=cpu"]
    words += ["--model.name=dit", f"--model.options={json.dumps(DIT)}"]
    monkeypatch.setattr("sys.argv", [*words, "--limit-seconds", "0"])
    benchmark("speedrun").main()
    assert "the same command goes on" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", words)
    benchmark("speedrun").main()
    (row,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert row["step"] == row["config"]["steps"]
    assert row["config"]["optimizer"]["cooldown"] == round(0.2 * row["step"])
    assert (tmp_path / "runs" / "uniform.png").exists()


# solvers ----------------------------------------------------------------------------------------------------------------


def test_checkpoints_are_judged_by_another_solver_once(benchmark, started, tmp_path, monkeypatch, capsys):
    """Each row is what `noisewise evaluate` says, here in this process, beside what the run was."""
    solvers, file = benchmark("solvers"), tmp_path / "rows.jsonl"
    here = argparse.Namespace(run=lambda words, **_: argparse.Namespace(returncode=main(words[3:])), PIPE=None, STDOUT=None)
    monkeypatch.setattr(solvers, "subprocess", here)
    folder = str(started.folder.path)
    words = ["solvers.py", folder, "--images", "40", "--precision", "fp32", "--workers", "1", "--json", str(file), "--solver"]
    for solver in ("ddpm:steps=3", "ddim:steps=3", "ddpm:steps=3"):
        monkeypatch.setattr("sys.argv", [*words, solver])
        solvers.main()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["solver"], row["step"], row["sampler"]) for row in rows] == [
        (solver, 6, started.config.sampler) for solver in ("ddpm:steps=3", "ddim:steps=3")
    ]
    assert rows[0]["digits-frechet"] != rows[1]["digits-frechet"]
    assert "1 of them in the file already" in capsys.readouterr().out


# thumbnails -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_images(benchmark, tmp_path):
    """Settings of thumbnails.py for 40 images of noise, and a classifier that has learned nothing."""
    torch.manual_seed(0)
    for name in ("data_batch_1.bin", "test_batch.bin"):
        (tmp_path / name).write_bytes(torch.randint(0, 10, (40, 3073), dtype=torch.uint8).numpy().tobytes())
    torch.save(benchmark("thumbnails").Classifier().state_dict(), tmp_path / "classifier.pt")
    paths = {"data": tmp_path, "classifier": tmp_path / "classifier.pt", "save": tmp_path, "json": tmp_path / "rows.jsonl"}
    numbers = {"seed": 0, "steps": 2, "marks": "1,2", "branch": 4, "batch": 8, "lr": 1e-3, "images": 8}
    also = {"also": "ddpm:steps=3,variance=fixed_large", "also_at": "1"}
    return argparse.Namespace(process="quadratic", **numbers, **paths, **also)


def test_a_pixel_of_a_thumbnail_is_the_mean_of_sixteen(benchmark, tmp_path):
    image = torch.arange(32, dtype=torch.uint8).repeat(32, 1).expand(3, 32, 32)
    (tmp_path / "data_batch_1.bin").write_bytes(bytes([7]) + image.numpy().tobytes())
    images, classes = benchmark("thumbnails").thumbnails(tmp_path, "data_batch_*.bin")
    torch.testing.assert_close(images[0, 1, 5], (torch.arange(8) * 4 + 1.5) / 127.5 - 1)
    assert classes.tolist() == [7]


@pytest.mark.filterwarnings("ignore:.*samples for 192 dimensions")
def test_a_branch_of_thumbnails_begins_where_training_was(benchmark, small_images):
    thumbnails = benchmark("thumbnails")
    thumbnails.train(small_images, "uniform")
    state = small_images.save / "uniform-0-2.pt"
    thumbnails.branch(argparse.Namespace(**{**vars(small_images), "lr": 0.0}), state, 3)
    training = thumbnails.Training(small_images)
    training.model.load_state_dict(torch.load(state, weights_only=True)["model"])
    expected = thumbnails.evaluated(training.model, training.objective, training.others, 8, thumbnails.SOLVER)["held_out"]
    first, other, trained, branched = (json.loads(line) for line in small_images.json.read_text().splitlines())
    assert branched["held_out"] == expected != trained["held_out"]  # of the average there
    assert (first["step"], other["step"], other["solver"]) == (1, 1, small_images.also)
    assert first["held_out"] == other["held_out"]
    assert first["distance"] != other["distance"]
    assert (branched["from"], branched["where"]) == (2, 3)
