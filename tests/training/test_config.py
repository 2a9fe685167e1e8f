"""Every setting can be given in a preset, in a file and on the command line, is read back as it was, and is checked."""

import copy
import os
import re
from dataclasses import replace

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

import noisewise
from noisewise.spec import build_process
from noisewise.training.config import Config
from noisewise.training.options import (
    PRESETS,
    as_yaml,
    changed,
    config_parser,
    load_config,
    load_preset,
    parse_config,
    plain,
    preset_names,
    preset_path,
    with_files,
)
from noisewise.training.stored import FREE_FORM

OTHER = {  # for each setting, a value that it has neither by default nor in the preset `digits`
    "name": "other",
    "out": "runs/other",
    "seed": 7,
    "process": "cosine:steps=50",
    "prediction": "v",
    "loss": "l1",
    "huber_delta": 0.25,
    "sigma_data": 0.75,
    "sampler": "logit_normal+minsnr:gamma=3",
    "steps": 11,
    "epochs": 2.5,
    "seconds": 1.5,
    "batch": 12,
    "accumulation": 2,
    "precision": "bf16",
    "device": "cuda",
    "parallel": "fsdp",
    "compile": True,
    "fast": "never",
    "deterministic": False,
    "max_bad_steps": 3,
    "data.source": "folder",
    "data.path": "pictures",
    "data.options": {"size": 8, "crop": "centre"},
    "data.shape": [3, 4, 5],
    "data.classes": 4,
    "data.flip": True,
    "data.resident": False,
    "data.workers": 5,
    "model.name": "uvit",
    "model.options": {"width": 16, "nested": {"list": [1, 2.5, "three", None]}},
    "model.conditional": True,
    "model.label_dropout": 0.25,
    "optimizer.name": "adamw",
    "optimizer.lr": 3e-5,
    "optimizer.betas": [0.5, 0.75],
    "optimizer.eps": 1e-6,
    "optimizer.warmup": 9,
    "optimizer.cooldown": 7,
    "optimizer.clip": None,
    "ema.kind": "power",
    "ema.decay": 0.5,
    "ema.ramp": False,
    "ema.std": 0.05,
    "checkpoint.every": 13,
    "checkpoint.keep": 5,
    "checkpoint.keep_every": 26,
    "log.every": 17,
    "log.trackers": ["wandb", "mlflow"],
    "log.samples_every": 19,
    "log.samples": 4,
    "log.sample_steps": 3,
    "evaluation.solver": "ddim:steps=7",
    "evaluation.images": 70,
    "evaluation.quick_solver": "euler:steps=3",
    "evaluation.quick_images": 30,
    "evaluation.data": "folder:pictures",
    "evaluation.data_options": {"size": 8},
    "evaluation.at_end": True,
    "optimizer.weight_decay": 0.125,
}
NEEDS = {"optimizer.weight_decay": ("optimizer.name", "adamw")}
APART = ("accumulation", "steps", "seconds")  # not beside every other setting

DIGITS = {"channels": 16, "multipliers": [1, 2], "blocks": 1, "attention": [], "dropout": 0.0}  # of the preset's network


def leaves(values, prefix=""):
    """Dotted names and values; the open dicts (`options`, `data_options`) are one value each."""
    for name, value in values.items():
        if isinstance(value, dict) and not name.endswith("options"):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def nested(names_and_values):
    """{"a.b": 1} as {"a": {"b": 1}}."""
    result = {}
    for name, value in names_and_values.items():
        group, _, last = name.rpartition(".")
        (result.setdefault(group, {}) if group else result)[last] = value
    return result


def overrides(name):
    return dict([NEEDS[name]] if name in NEEDS else []) | {name: OTHER[name]}


def as_arguments(values):
    return [
        f"--{name}={yaml.safe_dump(value, default_flow_style=True).removesuffix('...' + chr(10)).strip()}"
        for name, value in values.items()
    ]


def parsed(*arguments):
    return parse_config(config_parser(), list(arguments))


def test_every_setting_has_another_value_here():
    assert set(OTHER) == {name for name, _ in leaves(plain(Config()))}


# Presets


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_says_what_can_be_built(name):
    config = load_preset(name)
    assert config.name == name
    noisewise.recipe(config.sampler, build_process(config.process))
    written = dict(leaves(yaml.safe_load((PRESETS / f"{name}.yaml").read_text())))
    assert {key: value for key, value in leaves(plain(config)) if key in written} == written


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_the_same_after_printing(name, tmp_path):
    (tmp_path / "printed.yaml").write_text(as_yaml(load_preset(name)))
    assert load_config(tmp_path / "printed.yaml") == parsed("--config", str(tmp_path / "printed.yaml")) == load_preset(name)


@pytest.mark.parametrize("name", ["nothing", "", "../config", "digits.yaml", "Digits"])
def test_an_unknown_preset_is_told_all_that_there_are(name):
    with pytest.raises(ValueError, match=", ".join(preset_names())):
        preset_path(name)


# Overriding


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("way", ["command line", "file"])
def test_any_setting_can_be_overridden_and_nothing_else_changes(name, way, tmp_path):
    values = overrides(name)
    before = dict(leaves(plain(load_preset("digits"))))
    assert before[name] != OTHER[name]
    if way == "file":
        (tmp_path / "other.yaml").write_text(yaml.safe_dump(nested(values)))
        arguments = ["--config", str(tmp_path / "other.yaml")]
    else:
        arguments = as_arguments(values)
    assert dict(leaves(plain(load_preset("digits", *arguments)))) == before | values


@given(
    names=st.sets(st.sampled_from([name for name in OTHER if name not in APART]), max_size=12),
    split=st.integers(0, 12),
)
@settings(max_examples=25, deadline=None)
def test_any_settings_together_survive_a_file_and_the_command_line(names, split, tmp_path_factory):
    values = {key: value for name in sorted(names) for key, value in overrides(name).items()}
    path = tmp_path_factory.mktemp("config") / "some.yaml"
    in_file = dict(list(values.items())[:split])
    on_line = dict(list(values.items())[split:])
    if "optimizer.weight_decay" in in_file:
        in_file["optimizer.name"] = "adamw"
    path.write_text(yaml.safe_dump(nested(in_file)))
    config = parsed(*(["--config", str(path)] if in_file else []), *as_arguments(on_line))
    assert dict(leaves(plain(config))) == dict(leaves(plain(Config()))) | values
    path.write_text(as_yaml(config))
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("--model.options.channels", "32", {**DIGITS, "channels": 32}),
        ("--model.options.dropout", "0.5", {**DIGITS, "dropout": 0.5}),
        ("--model.options.attention", "[8, 4]", {**DIGITS, "attention": [8, 4]}),
        ("--model.options.groups", "4", {**DIGITS, "groups": 4}),
        ("--model.options", "{width: 32}", {"width": 32}),
    ],
)
def test_options_of_the_model_can_be_given_one_by_one_or_all_at_once(argument, value, expected):
    assert load_preset("digits", argument, value).model.options == expected


def test_the_later_one_wins(tmp_path):
    for name, steps, batch in [("first", 5, 6), ("second", 7, 8)]:
        (tmp_path / f"{name}.yaml").write_text(f"steps: {steps}\nbatch: {batch}\n")
    first, second = str(tmp_path / "first.yaml"), str(tmp_path / "second.yaml")
    assert parsed("--config", first, "--config", second).steps == 7
    assert parsed("--config", second, "--config", first).steps == 5
    config = parsed("--config", first, "--steps=9", "--steps=11")
    assert (config.steps, config.batch) == (11, 6)
    assert parsed("--steps=9", "--config", first).steps == 5
    both = parsed(*with_files([], ["digits", "cifar10"]))
    assert (both.name, both.steps, both.log.every) == ("cifar10", 1_000_000, 100)


@pytest.mark.parametrize(
    ("arguments", "steps", "epochs"),
    [
        (["epochs"], 100_000, 3),
        (["both"], 7, 3),  # as in the config.yaml of a run: the steps are what the epochs were
        (["both", "steps"], 5, None),
        (["steps", "epochs"], 5, 3),
        (["epochs", "--steps=9"], 9, None),
        (["--steps=9", "epochs"], 9, 3),
        (["steps", "--epochs=0.5"], 5, 0.5),
        (["epochs", "--name=--steps"], 100_000, 3),
    ],
)
def test_the_later_of_steps_and_epochs_counts(arguments, steps, epochs, tmp_path):
    files = {"steps": "steps: 5\n", "epochs": "epochs: 3\n", "both": "steps: 7\nepochs: 3\n"}
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    given = [f"--config={tmp_path / one}.yaml" if one in files else one for one in arguments]
    config = parsed(*given)
    assert (config.steps, config.epochs) == (steps, epochs)
    printed = yaml.safe_load(as_yaml(config))
    assert (printed["steps"], printed["epochs"]) == (steps, epochs)


def test_steps_and_epochs_on_one_line_are_refused():
    with pytest.raises(ValueError, match="give --steps or --epochs, not both"):
        parsed("--steps=3", "--epochs=3")


def test_epochs_are_as_many_steps_as_the_data_need():
    assert Config(batch=128, epochs=2040).for_data(50_000).steps == 796_875  # Table 7 of arXiv 2411.09998
    assert Config(batch=10, epochs=1).for_data(11).steps == 2
    assert Config(batch=10, epochs=0.5).for_data(11).steps == 1
    assert Config(batch=10, steps=7).for_data(11).steps == 7


def test_a_stored_configuration_comes_before_presets_and_arguments(tmp_path):
    stored = tmp_path / "config.yaml"
    assert parse_config(config_parser(), ["--steps=1"], stored=stored) == parsed("--steps=1")
    stored.write_text(as_yaml(load_preset("cifar10", "--batch=32")))
    config = parse_config(config_parser(), with_files(["--steps=1"], ["digits"]), stored=stored)
    assert (config.steps, config.batch, config.data.flip) == (1, 192, True)


# Reading back


@given(
    name=st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=12),
    lr=st.floats(min_value=1e-300, max_value=1e300),
    seed=st.integers(0, 2**63),
    seconds=st.none() | st.floats(min_value=1e-9, max_value=1e12),
)
@example(name="1e5", lr=1e-5, seed=0, seconds=1e9)
@example(name="-1.5E+3", lr=1.0, seed=0, seconds=None)
@example(name="null", lr=1e22, seed=0, seconds=None)
@example(name="# a", lr=1e-4, seed=0, seconds=None)
@example(name="[x]: {", lr=1e-4, seed=0, seconds=None)
@settings(max_examples=30, deadline=None)
def test_what_is_written_as_yaml_is_read_back(name, lr, seed, seconds, tmp_path_factory):
    config = Config(name=name, seed=seed, seconds=seconds)
    config.optimizer.lr = lr
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(as_yaml(config))
    assert load_config(path) == config
    assert isinstance(load_config(path).optimizer.betas, tuple)


WORDS = {"a": "12", "b": "true", "c": "null", "d": "1e5", "e": "012", "f": "1: 2", "g": "[1]", "h": "word", "i": ["1", 2]}


@pytest.mark.parametrize("name", FREE_FORM)
def test_words_in_quotes_stay_words_among_free_options(name, tmp_path):
    config, path = Config(), tmp_path / "config.yaml"
    group, _, last = name.partition(".")
    setattr(getattr(config, group), last, {**WORDS, "number": 12, "truth": True, "nothing": None})
    path.write_text(as_yaml(config))
    assert load_config(path) == config
    assert parsed("--config", str(path)) == config
    assert parsed("--config", str(path), "--steps=3") == replace(config, steps=3)


def test_words_in_quotes_stay_words_under_a_dotted_key(tmp_path):
    (tmp_path / "dotted.yaml").write_text('data.options: {name: "007"}')
    assert parsed("--config", str(tmp_path / "dotted.yaml")).data.options == {"name": "007"}


@pytest.mark.parametrize(
    "later",
    [
        ["--data={source: folder, options: {name: other}}"],
        ["--data", "{options: {name: other}}"],
        ["--config", "{data: {options: {name: other}}}"],
        ["--config", "dotted.yaml"],
        ["--data.options.name", "other"],
    ],
)
def test_no_word_of_a_file_comes_before_what_is_given_after_it(later, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.yaml").write_text('data: {options: {name: "007"}}')
    (tmp_path / "dotted.yaml").write_text("data.options: {name: other}")
    assert parsed("--config", "first.yaml", *later).data.options == {"name": "other"}


def test_a_mistake_in_long_settings_of_one_line_is_named():
    with pytest.raises(ValueError, match="stepz"):
        parsed("--config", "{name: " + 300 * "a" + ", stepz: 3}")


def test_what_overrides_a_word_in_quotes_is_read_as_ever(tmp_path):
    first, second = str(tmp_path / "first.yaml"), str(tmp_path / "second.yaml")
    (tmp_path / "first.yaml").write_text('data: {options: {a: "12", b: "13"}}')
    (tmp_path / "second.yaml").write_text("data: {options: {a: 12}}")
    assert parsed("--config", first, "--data.options.a", "14").data.options == {"a": 14, "b": "13"}
    assert parsed("--config", first, "--data.options.a=true").data.options == {"a": True, "b": "13"}
    assert parsed("--config", first, "--data.options={a: 15}").data.options == {"a": 15}
    assert parsed("--config", first, "--config", second).data.options == {"a": 12}
    assert parsed("--config", second, f"--config={first}").data.options == {"a": "12", "b": "13"}


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step=3"], "step"),
        (["--steps=many"], "steps must be a whole number, got many"),
        (["--steps=1.5"], r"steps must be a whole number, got 1\.5"),
        (["--loss=l3"], "(?s)loss.*mse.*l3"),
        (["--optimizer.betas=[0.5]"], r"betas must be \[a number, a number\], got \[0\.5\]"),
        (["--optimizer.lr=fast"], "lr must be a number, got fast"),
        (["--data.flip=perhaps"], "flip must be true or false, got perhaps"),
        (["--log.trackers=wandb"], r"trackers must be \[a word\], got wandb"),
        (["--config=nowhere.yaml"], "nowhere.yaml"),
        (["--model=null"], "(?s)model.*null"),
    ],
)
def test_what_cannot_be_understood_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_preset("digits", *arguments)


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        ("--stpes=3", "--steps"),
        ("--optimizer.lrr=3", "--optimizer.lr"),
        ("--checkpoint.kep=3", "--checkpoint.keep"),
        ("--smapler=uniform", "--sampler"),
    ],
)
def test_a_misspelt_option_is_told_which_one_was_probably_meant(argument, meant):
    with pytest.raises(ValueError, match=rf"; did you mean {meant}\?$") as error:
        load_preset("digits", argument)
    assert argument.partition("=")[0].lstrip("-") in str(error.value)


@pytest.mark.parametrize("arguments", [["--qqqqqq=3"], ["--steps=many"]])
def test_there_is_no_suggestion_where_none_is_close_or_the_option_is_right(arguments):
    with pytest.raises(ValueError, match=arguments[0].lstrip("-").partition("=")[0]) as error:
        load_preset("digits", *arguments)
    assert "did you mean" not in str(error.value)


IMPOSSIBLE = {
    "steps": 0,
    "epochs": 0.0,
    "batch": 0,
    "accumulation": 0,
    "max_bad_steps": 0,
    "huber_delta": 0.0,
    "sigma_data": -0.5,
    "checkpoint.every": 0,
    "checkpoint.keep": 0,
    "log.every": -1,
    "log.sample_steps": 0,
    "evaluation.images": 1,
    "evaluation.quick_images": 1,
    "optimizer.lr": 0.0,
    "optimizer.eps": -1e-8,
    "seconds": 0.0,
    "optimizer.clip": 0.0,
    "seed": -1,
    "optimizer.warmup": -1,
    "optimizer.cooldown": -1,
    "optimizer.weight_decay": -0.1,
    "checkpoint.keep_every": -1,
    "log.samples_every": -1,
    "log.samples": -1,
    "data.workers": -1,
    "model.label_dropout": 1.0,
    "ema.decay": 1.0,
}


def with_value(name, value, config=None):
    config = copy.deepcopy(config or Config())
    group, _, last = name.rpartition(".")
    assert hasattr(getattr(config, group) if group else config, last)
    setattr(getattr(config, group) if group else config, last, value)
    return config


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_values_are_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"^{name}.*{IMPOSSIBLE[name]}"):
        with_value(name, IMPOSSIBLE[name]).check()
    with pytest.raises(ValueError, match=f"^{name}"):
        load_preset("digits", f"--{name}={IMPOSSIBLE[name]}")


@pytest.mark.parametrize(
    "name", ["seconds", "sigma_data", "huber_delta", "optimizer.lr", "optimizer.clip", "model.label_dropout", "ema.decay"]
)
def test_what_is_not_a_number_is_refused(name):
    with pytest.raises(ValueError, match=name):
        with_value(name, float("nan")).check()


@pytest.mark.parametrize("betas", [(1.0, 0.999), (0.9, 1.0), (-0.1, 0.999), (0.9, float("nan"))])
def test_impossible_betas_are_refused(betas):
    with pytest.raises(ValueError, match=r"^optimizer\.betas must lie in \[0, 1\), got \("):
        with_value("optimizer.betas", betas).check()
    with pytest.raises(ValueError, match=r"^optimizer\.betas must lie in \[0, 1\)"):
        load_preset("digits", f"--optimizer.betas=[{betas[0]}, {str(betas[1]).replace('nan', '.nan')}]")


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("process", "linaer", "did you mean 'linear'"),
        ("process", "linear:steps=0", "a schedule needs at least one timestep, got 0"),
        ("sampler", "unifrm", "did you mean 'uniform'"),
        ("sampler", "adaptive+minsrn", "did you mean 'minsnr'"),
        ("sampler", "speed:kk=5", "kk"),
    ],
)
def test_specs_that_cannot_be_built_are_refused_with_the_settings(name, spec, message):
    with pytest.raises(ValueError, match=message):
        with_value(name, spec).check()
    with pytest.raises(ValueError, match=message):
        load_preset("digits", f"--{name}={spec}")


def test_settings_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="batch=192 does not divide into accumulation=5"):
        load_preset("digits", "--accumulation=5")
    with pytest.raises(ValueError, match=r"optimizer\.name=adamw"):
        load_preset("digits", "--optimizer.weight_decay=0.1")


def test_latents_can_be_evaluated_at_the_end_if_real_images_are_named():
    arguments = ["--data.source=latents", "--data.path=somewhere", "--evaluation.at_end=true"]
    with pytest.raises(ValueError, match=r"--evaluation\.data folder:images"):
        parsed(*arguments)
    assert parsed(*arguments, "--evaluation.data=folder:images").evaluation.at_end


def test_a_file_of_before_there_were_evaluations_is_read(tmp_path):
    before = {key: value for key, value in plain(load_preset("digits")).items() if key not in ("evaluation", "epochs")}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(before))
    assert load_config(tmp_path / "config.yaml") == load_preset("digits")


def test_the_objective_has_all_its_settings():
    config = Config(process="edm", prediction="edm", loss="huber", huber_delta=0.25, sigma_data=0.75)
    found = config.objective()
    assert (found.prediction, found.loss, found.huber_delta, found.sigma_data) == ("edm", "huber", 0.25, 0.75)
    assert type(found.process).__name__ == "EDM"


# Resuming


FREE = {
    *("name", "out", "steps", "epochs", "seconds", "accumulation", "precision", "device", "parallel", "compile", "fast"),
    *("deterministic", "max_bad_steps"),
    *("data.path", "data.shape", "data.classes", "data.resident", "data.workers", "optimizer.lr", "optimizer.clip"),
    "optimizer.cooldown",
    *(name for name in OTHER if name.startswith(("checkpoint.", "log.", "evaluation."))),
}


@pytest.mark.parametrize("name", OTHER)
def test_a_change_is_named_exactly_if_the_setting_is_pinned(name):
    old = load_preset("digits")
    new = load_preset("digits", *as_arguments({name: OTHER[name]} if name not in NEEDS else overrides(name)))
    found, others = ([text.partition(":")[0] for text in texts] for texts in changed(old, new))
    if name in FREE:
        assert found == []
        assert others == {"out": [], "evaluation.data_options": [f"{name}.size"]}.get(name, [name])
    elif name.endswith("options"):
        assert found
        assert all(text.startswith(f"{name}.") for text in found)
    else:
        assert found == sorted([name, *([NEEDS[name][0]] if name in NEEDS else [])])
    assert changed(new, new) == ([], [])


def test_a_word_that_became_a_number_is_told_apart_from_it():
    old, new = Config(), Config()
    old.data.options, new.data.options = {"size": 8}, {"size": "8"}
    assert changed(old, new) == (["data.options.size: 8 -> '8'"], [])


def test_a_change_shows_both_values():
    arguments = ["--optimizer.lr=0.5", "--optimizer.eps=0.25", "--model.options.channels=8", "--steps=9"]
    old, new = load_preset("digits"), load_preset("digits", *arguments)
    assert changed(old, new) == (
        ["model.options.channels: 16 -> 8", "optimizer.eps: 1e-08 -> 0.25"],
        ["steps: 2000 -> 9", "optimizer.lr: 0.003 -> 0.5"],
    )
    assert changed(old, load_preset("digits", "--model.options={channels: 16, blocks: 1}")) == (
        [
            "model.options.multipliers: [1, 2] -> None",
            "model.options.attention: [] -> None",
            "model.options.dropout: 0.0 -> None",
        ],
        [],
    )


@pytest.mark.parametrize(
    "sampler", ["gradient_variance", "adaptive:estimator=lookahead", "mix:of=(gradient_variance),floor=0.1"]
)
def test_samplers_that_differentiate_do_not_go_with_a_scaled_loss(sampler):
    with pytest.raises(ValueError, match="use bf16 or fp32"):
        load_preset("digits", "--precision=fp16", f"--sampler={sampler}")
    load_preset("digits", "--precision=bf16", f"--sampler={sampler}")


def test_reading_a_file_never_leaves_the_working_directory(tmp_path, monkeypatch):
    """Other threads begin runs with relative paths while one looks at a folder: one such run was trained inside another's."""
    path = tmp_path / "config.yaml"
    expected = load_preset("digits")
    path.write_text(as_yaml(expected))

    def gone(where):
        raise AssertionError(f"went to {where}")

    monkeypatch.setattr(os, "chdir", gone)
    assert load_config(path) == expected


BAD_FILES = {
    "stepz: 3": "there is no setting 'stepz'; did you mean 'steps'?",
    "model:\n  nmae: dit": "there is no setting 'model.nmae'; did you mean 'model.name'?",
    "zzz: 3": "there is no setting 'zzz'",
    "1: 2": "there is no setting '1'",
    "steps: many": "steps must be a whole number, got many",
    "data:\n  flip: perhaps": "data.flip must be true or false, got perhaps",
    "data:\n  shape: 3": "data.shape must be [a whole number, ...] or null, got 3",
    "prediction: epsilon": "prediction must be one of eps, x0, v, flow, edm, got epsilon",
    "steps: [1\nseed: }": "this is no YAML in line 2, column 5: ",
    "steps: 1: 2": "this is no YAML in line 1, column 9: mapping values are not allowed",
    "- 1": "'[1]' is no setting: write them as YAML, one a line, as in steps: 1000",
    "garbage": "'garbage' is no setting: write them as YAML",
    "": "there are no settings in it: write them as YAML",
    "\xff\xfe": "this is no text: settings are written as YAML",
    "optimizer: 3": "optimizer",
    "model: null": "model",
    "data:\n  options: [1]": "data.options must be names and values in braces, as in '{size: 8}', got [1]",
}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *BAD_FILES.items(),
        ("steps: {a: 1}", "steps must be a value"),
        ("!!python/object/apply:os.system [x]", "this is no YAML"),
    ],
)
def test_a_bad_file_is_a_value_error_that_names_it(tmp_path, text, said):
    path = tmp_path / "config.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=re.escape(f"{path}: {said}")):
        load_config(path)


@pytest.mark.parametrize(("text", "said"), BAD_FILES.items())
@pytest.mark.parametrize("joined", [True, False])
def test_so_it_is_on_the_command_line_among_good_ones(tmp_path, text, said, joined):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("steps: 5\nmodel:\n  options:\n    anything: 3\n")
    bad.write_bytes(text.encode("latin-1"))
    files = [f"--config={good}", f"--config={bad}"] if joined else ["--config", str(good), "--config", str(bad)]
    with pytest.raises(ValueError, match=re.escape(said)) as failure:
        load_preset("digits", *files)
    assert str(bad) in str(failure.value) or text in ("optimizer: 3", "model: null")
    assert "good.yaml" not in str(failure.value)


@pytest.mark.parametrize(
    ("change", "name"), [({"batch": 2**63}, "batch"), ({"batch": 10**7}, "batch"), ({"steps": 2**63}, "steps")]
)
def test_numbers_that_nothing_can_hold_are_refused(change, name):
    with pytest.raises(ValueError, match=f"{name} must be below"):
        Config(**change).check()
