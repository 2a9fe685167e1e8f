"""Spec strings: what is documented builds, and what is wrong is explained."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from noisewise.objective import Objective
from noisewise.processes import DDPM
from noisewise.samplers import SAMPLERS, AdaptiveSampler, LogitNormal, Mix, Product, SpeeD, Switch, Uniform
from noisewise.spec import SpecError, Term, build, build_weighting, parse
from noisewise.weighting import WEIGHTINGS, ChangeAware, Learned, MinSNR, NoWeight

DOCUMENTED = [
    "uniform",
    "minsnr:gamma=5",
    "speed:k=5",
    "speed:k=5+change_aware",
    "lognormal+minsnr:gamma=5",
    "mix:of=(speed:k=5),floor=0.1",
    "adaptive+minsnr",
    "adaptive:every=40,floor=0.1",
]
NEEDED = {
    "table": "file={file}",
    "mix": "of=speed",
    "shift": "of=(lognormal:mean=1)",
    "product": "of=uniform,weight=minsnr",
    "curriculum": "start=uniform,end=(lognormal:std=2)",
    "switch": "first=uniform,then=(mix:of=speed),at=10",
}


def process():
    return DDPM.linear(100)


def weights_of(weighting, u=None):
    u = torch.linspace(0.05, 0.95, 19) if u is None else u
    return weighting(Objective(process()), u)


@pytest.mark.parametrize("spec", DOCUMENTED)
def test_documented_examples(spec):
    recipe = build(spec, process())
    assert recipe.spec == spec
    u = recipe.sampler.sample(8).u
    assert bool(torch.isfinite(recipe.weighting.weights(Objective(process()), u)).all())


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_has_a_spec(name, tmp_path):
    np.save(tmp_path / "table.npy", np.arange(1.0, 5.0))
    options = NEEDED.get(name, "").format(file=tmp_path / "table.npy")
    recipe = build(f"{name}:{options}" if options else name, process(), seed=3)
    assert recipe.sampler.seed == 3
    assert recipe.sampler.sample(4).u.shape == (4,)
    assert isinstance(recipe.weighting, NoWeight)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_every_weighting_has_a_spec(name):
    recipe = build(name, process())
    assert isinstance(recipe.sampler, Uniform)
    torch.testing.assert_close(weights_of(recipe.weighting), weights_of(WEIGHTINGS[name]()))
    assert type(build_weighting(name)) is type(WEIGHTINGS[name]())


def test_settings_arrive():
    recipe = build("speed:k=3,tau=40,mirror=true,correction=clipped(5),draws=stratified,seed=7+change_aware:lam=0.7", process())
    sampler = recipe.sampler
    assert isinstance(sampler, SpeeD)
    assert (sampler.k, sampler.tau, sampler.mirror, sampler.draws, sampler.seed) == (3, 40, True, "stratified", 7)
    assert str(sampler.correction) == "clipped(5)"
    assert isinstance(recipe.weighting, ChangeAware)
    assert recipe.weighting.lam == 0.7


def test_values_have_types():
    assert build("vlb:clip=none,variance=small,normalise=false", process()).weighting.clip is None
    assert build("vlb:clip=2e1,variance=small", process()).weighting.clip == 20.0
    assert build("vlb:normalise=False", process()).weighting.normalise is False
    assert build("lognormal:mean=-0.5", process()).sampler.mean == -0.5


def test_settings_of_the_spec_go_before_common_ones():
    assert build("uniform:seed=5", process(), seed=1).sampler.seed == 5
    assert build("uniform", process(), seed=1, draws="antithetic").sampler.draws == "antithetic"


def test_order_and_spaces_do_not_matter():
    one, other = build("lognormal:std=2+minsnr", process()), build(" minsnr + lognormal : std = 2 ", process())
    assert isinstance(other.sampler, LogitNormal)
    assert one.sampler.std == other.sampler.std == 2
    assert isinstance(other.weighting, MinSNR)


def test_weightings_multiply():
    product = build("minsnr:gamma=2+p2+debiased", process()).weighting
    expected = weights_of(MinSNR(2.0)) * weights_of(WEIGHTINGS["p2"]()) * weights_of(WEIGHTINGS["debiased"]())
    torch.testing.assert_close(weights_of(product), expected)


@pytest.mark.parametrize("spec", ["minsnr+p2+learned", "minsnr+learned+p2", "learned+minsnr+p2"])
def test_a_learned_weight_acts_last_wherever_it_is_named(spec):
    weighting = build(spec, process()).weighting
    learned = next(module for module in weighting.modules() if isinstance(module, Learned))
    torch.nn.init.normal_(learned.coefficients, std=0.1, generator=torch.Generator().manual_seed(0))
    objective, u = Objective(process()), torch.linspace(0.05, 0.95, 19)
    s = learned.log_variance(objective.process.log_snr(u))
    expected = weights_of(MinSNR()) * weights_of(WEIGHTINGS["p2"]()) * u * torch.exp(-s) + s
    torch.testing.assert_close(weighting.weighted(u, objective, u), expected)


def test_nesting():
    recipe = build("switch:first=(mix:of=(speed:k=3),floor=0.25),then=(lognormal:mean=1),at=5+minsnr", process())
    sampler = recipe.sampler
    assert isinstance(sampler, Switch)
    assert isinstance(sampler.first, Mix)
    assert isinstance(sampler.first.of, SpeeD)
    assert (sampler.first.of.k, sampler.first.floor, sampler.then.mean, sampler.at) == (3, 0.25, 1, 5)


def test_product_takes_a_weighting():
    sampler = build("product:of=uniform,weight=(minsnr:gamma=2+p2)", process()).sampler
    assert isinstance(sampler, Product)
    u = (torch.arange(100) + 0.5) / 100
    expected = weights_of(MinSNR(2.0), u) * weights_of(WEIGHTINGS["p2"](), u)
    torch.testing.assert_close(sampler.density(u), expected / expected.mean(), rtol=1e-4, atol=1e-6)


def test_product_knows_the_prediction():
    u = (torch.arange(100) + 0.5) / 100
    sampler = build("product:of=uniform,weight=minsnr", process(), prediction="v").sampler
    expected = MinSNR().weights(Objective(process(), "v"), u)
    torch.testing.assert_close(sampler.density(u), expected / expected.mean(), rtol=1e-4, atol=1e-6)


# Targets of learning samplers


@pytest.mark.parametrize("name", ["adaptive", "loss_adaptive"])
def test_the_weighting_is_the_target(name):
    recipe = build(f"{name}+minsnr:gamma=3", process(), prediction="v")
    assert recipe.sampler.target is recipe.weighting
    assert recipe.sampler.objective.prediction == "v"


def test_a_target_of_its_own_goes_first():
    recipe = build("adaptive:target=(vlb:clip=4)+minsnr", process())
    assert (recipe.sampler.target.clip, type(recipe.weighting)) == (4, MinSNR)


@pytest.mark.parametrize("spec", ["adaptive", "adaptive+none"])
def test_no_weighting_no_target(spec):
    assert build(spec, process()).sampler.target is None


@pytest.mark.parametrize(
    "spec",
    ["mix:of=adaptive,floor=0.1+minsnr", "switch:first=uniform,then=adaptive,at=5+minsnr", "mix:of=(mix:of=adaptive)+minsnr"],
)
def test_a_learning_sampler_inside_another_gets_target_and_prediction(spec):
    recipe = build(spec, process(), prediction="v")
    inner = next(module for module in recipe.sampler.modules() if isinstance(module, AdaptiveSampler))
    assert inner.objective.prediction == "v"
    assert isinstance(inner.target, MinSNR)


# Errors


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("unifrom", r"unknown sampler or weighting 'unifrom': did you mean 'uniform'\?"),
        ("lognormal+minsrn", r"did you mean 'minsnr'\?"),
        ("zzzzzz", r"unknown sampler or weighting 'zzzzzz'\. Known: adaptive"),
        ("speed:kk=5", r"unknown setting of speed 'kk': did you mean 'k'\?"),
        ("minsnr:gama=5", r"unknown setting of minsnr 'gama': did you mean 'gamma'\?"),
        ("uniform:k=5", r"unknown setting of uniform 'k'"),
        ("uniform:process=1", "unknown setting of uniform 'process'"),
        ("speed:5", r"'5' should be key=value, as in speed:key=value"),
        ("speed:k=", r"'k=' should be key=value"),
        ("speed:=5", r"'=5' should be key=value"),
        ("speed:k=5,", "should be key=value"),
        ("speed:k=5,k=6", "k is given twice"),
        ("mix:of=(speed,floor=0.1", "brackets do not match"),
        ("mix:of=speed),floor=0.1", "brackets do not match"),
        ("speed+lognormal", "names two samplers, speed and lognormal; use mix, switch or product"),
        ("mix:floor=0.1", "mix needs of, as in mix:of="),
        ("switch:first=uniform", "switch needs then, at"),
        ("product:of=uniform", "product needs weight"),
        ("minsnr:gamma=abc", "gamma=abc: expected a number, true, false or none"),
        ("minsnr:gamma=none", "minsnr: "),
        ("speed:k=(5)", r"k=\(5\): expected a number"),
        ("mix:of=(speed+minsnr)", "should be a sampler alone"),
        ("mix:of=sped", r"did you mean 'speed'\?"),
        ("product:of=uniform,weight=speed", "names the sampler speed"),
        ("", "a name is missing"),
        ("speed+", "a name is missing"),
        (":k=5", "a name is missing"),
    ],
)
def test_errors_show_what_was_meant(spec, message):
    with pytest.raises(SpecError, match=message):
        build(spec, process())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("minsnr:gamma=-1", "gamma must be positive, got -1"),
        ("speed:k=0", "k must be positive"),
        ("change_aware:lam=5", "lam must lie in"),
        ("uniform:draws=sorted", "unknown draws 'sorted'"),
        ("uniform:correction=clipped", "unknown correction"),
        ("vlb:variance=medium", '"large" or "small"'),
        ("mix:of=speed,floor=2", r"floor must lie in \[0, 1\]"),
    ],
)
def test_wrong_values_are_explained_by_their_owner(spec, message):
    with pytest.raises(ValueError, match=message):
        build(spec, process())


def test_a_lone_weighting_or_sampler():
    with pytest.raises(SpecError, match="names the sampler speed"):
        build_weighting("speed")
    with pytest.raises(SpecError, match="should be a sampler alone"):
        build("mix:of=minsnr", process())


# Parsing


def test_parse():
    assert parse("mix:of=(speed:k=5,tau=3+p2),floor=0.1+minsnr") == [
        Term("mix", {"of": "(speed:k=5,tau=3+p2)", "floor": "0.1"}),
        Term("minsnr", {}),
    ]


@given(text=st.text(alphabet=st.one_of(st.sampled_from("+:,=() abk5"), st.characters()), max_size=40))
@example(text=")(")
@example(text="a:b=(c+d")
@settings(max_examples=300, deadline=None)
def test_parse_raises_nothing_but_spec_errors(text):
    try:
        terms = parse(text)
    except SpecError:
        return
    assert terms
    assert all(term.name for term in terms)


words = st.text(alphabet="abcdefgh_123", min_size=1, max_size=6)
values = st.one_of(words, words.map(lambda word: f"({word}:x=1,y=2+{word})"))
terms = st.builds(Term, words, st.dictionaries(words, values, max_size=3))


def written(term):
    options = ",".join(f"{key}={value}" for key, value in term.options.items())
    return f"{term.name}:{options}" if options else term.name


@given(terms=st.lists(terms, min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_parse_reads_what_was_written(terms):
    assert parse("+".join(map(written, terms))) == terms
