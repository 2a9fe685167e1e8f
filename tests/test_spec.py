"""Spec strings: what is documented builds, and what is wrong is explained."""

import copy
import pickle
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import noisewise
from noisewise.objective import Objective
from noisewise.processes import DDPM, EDM, VE, VP, Flow
from noisewise.samplers import SAMPLERS, AdaptiveSampler, LogitNormal, Mix, Product, Sampler, SpeeD, Switch, Uniform
from noisewise.samplers.learning import Learner
from noisewise.spec import SpecError, Term, build_process, build_weighting, parse, split_specs
from noisewise.weighting import P2, WEIGHTINGS, ChangeAware, Learned, MinSNR, NoWeight, Weighting

NEEDED = {
    "table": "file={file}",
    "mix": "of=speed",
    "shift": "of=(logit_normal:mean=1)",
    "product": "of=uniform,weight=minsnr",
    "curriculum": "start=uniform,end=(logit_normal:std=2)",
    "switch": "first=uniform,then=(mix:of=speed),at=10",
    "curriculum_sampling": "total=1000",
    "pairs": "of=logit_normal",
    "piecewise": "stages=(0=uniform,10=(mix:of=speed))",
}


def process():
    return DDPM.linear(100)


def weights_of(weighting, u=None):
    u = torch.linspace(0.05, 0.95, 19) if u is None else u
    return weighting(Objective(process()), u)


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_has_a_spec(name, tmp_path):
    np.save(tmp_path / "table.npy", np.arange(1.0, 5.0))
    options = NEEDED.get(name, "").format(file=tmp_path / "table.npy")
    recipe = noisewise.recipe(f"{name}:{options}" if options else name, process(), seed=3)
    assert recipe.sampler.seed == 3
    assert recipe.sampler.sample(4).u.shape == (4,)
    assert type(recipe.weighting) is (recipe.sampler.comes_with or NoWeight)


def test_a_published_method_brings_its_weight_unless_another_is_named():
    torch.testing.assert_close(weights_of(noisewise.recipe("speed_published", process()).weighting), weights_of(P2()))
    torch.testing.assert_close(weights_of(noisewise.recipe("speed_published:seed=3", process()).weighting), weights_of(P2()))
    assert isinstance(noisewise.recipe("speed_published+none", process()).weighting, NoWeight)
    assert isinstance(noisewise.recipe("speed_published+minsnr", process()).weighting, MinSNR)
    assert isinstance(noisewise.recipe("mix:of=speed_published", process()).weighting, NoWeight)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_every_weighting_has_a_spec(name):
    recipe = noisewise.recipe(name, process())
    assert isinstance(recipe.sampler, Uniform)
    torch.testing.assert_close(weights_of(recipe.weighting), weights_of(WEIGHTINGS[name]()))
    assert type(build_weighting(name)) is type(WEIGHTINGS[name]())


def test_settings_arrive():
    recipe = noisewise.recipe(
        "speed:k=3,tau=40,mirror=true,correction=clipped(5),draws=stratified,seed=7+change_aware:lam=0.7", process()
    )
    sampler = recipe.sampler
    assert isinstance(sampler, SpeeD)
    assert (sampler.k, sampler.tau, sampler.mirror, sampler.draws, sampler.seed) == (3, 40, True, "stratified", 7)
    assert str(sampler.correction) == "clipped(5)"
    assert isinstance(recipe.weighting, ChangeAware)
    assert recipe.weighting.lam == 0.7


def test_values_have_types():
    assert noisewise.recipe("vlb:clip=none,variance=small,normalise=false", process()).weighting.clip is None
    assert noisewise.recipe("vlb:clip=2e1,variance=small", process()).weighting.clip == 20.0
    assert noisewise.recipe("vlb:normalise=False", process()).weighting.normalise is False
    for text, value in (("-0.5", -0.5), ("-1e+0", -1), ("-2.5E+0", -2.5)):
        assert noisewise.recipe(f"logit_normal:mean={text}+minsnr", process()).sampler.mean == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e+3", 1000),
        ("1E+3", 1000),
        ("2.5e+1", 25),
        (".5e+1", 5),
        ("5.e+0", 5),
        ("1e3", 1000),
        ("1e-3", 1e-3),
        ("2.5E+0", 2.5),
    ],
)
def test_numbers_with_an_exponent(text, value):
    recipe = noisewise.recipe(f"switch:first=(speed:k={text}+none),then=uniform,at=3+minsnr:gamma={text}+p2", process())
    assert recipe.sampler.first.k == value
    expected = weights_of(MinSNR(value)) * weights_of(WEIGHTINGS["p2"]())
    torch.testing.assert_close(weights_of(recipe.weighting), expected)


def test_the_types_of_settings_are_read_from_their_annotations(monkeypatch):
    class Own(Uniform):
        def __init__(
            self,
            process,
            *,
            word: str = "a",
            path: str | None = None,
            inner: Sampler | None = None,
            by: Weighting | None = None,
            number: float = 0.0,
            shape: Literal["flat", "round"] = "flat",
            flag=False,
            plain=1,
            limit=None,
            anything: Any = 0,
            which: Literal[1, 2] | None = None,
            **common,
        ):
            super().__init__(process, **common)
            self.word, self.path, self.inner, self.by, self.number, self.plain = word, path, inner, by, number, plain
            self.shape, self.flag, self.limit, self.anything, self.which = shape, flag, limit, anything, which

    monkeypatch.setitem(SAMPLERS, "own", Own)
    sampler = noisewise.recipe(
        "own:word=5,path=b.npy,inner=(speed:k=3),by=(minsnr:gamma=2+p2),number=4,plain=7,shape=round,flag=true", process()
    ).sampler
    assert (sampler.word, sampler.path, sampler.number, sampler.plain) == ("5", "b.npy", 4, 7)
    assert (sampler.shape, sampler.flag) == ("round", True)
    other = noisewise.recipe("own:plain=0.5,limit=2,anything=3.5,which=2", process()).sampler
    assert (other.plain, other.limit, other.anything, other.which) == (0.5, 2, 3.5, 2)
    assert noisewise.recipe("own:limit=none,which=none", process()).sampler.which is None
    assert isinstance(sampler.inner, SpeeD)
    torch.testing.assert_close(weights_of(sampler.by), weights_of(MinSNR(2.0)) * weights_of(WEIGHTINGS["p2"]()))
    for wrong, message in [
        ("number=b", "expected a number$"),
        ("number=none", "expected a number$"),
        ("shape=square", "expected flat or round$"),
        ("flag=1", "expected true or false$"),
        ("which=3", "expected 1 or 2 or none$"),
        ("limit=b", "expected a number or none$"),
        ("inner=minsnr", "a sampler alone"),
        ("by=speed", "names the sampler"),
    ]:
        with pytest.raises(SpecError, match=message):
            noisewise.recipe(f"own:{wrong}", process())


def test_a_setting_that_must_be_given_and_has_no_annotation_is_a_number(monkeypatch):
    class Own(Uniform):
        def __init__(self, process, need, **common):
            super().__init__(process, **common)
            self.need = need

    monkeypatch.setitem(SAMPLERS, "own", Own)
    assert noisewise.recipe("own:need=0.3", process()).sampler.need == 0.3


def test_annotations_that_cannot_be_found_are_said_to_be_so(monkeypatch):
    class Own(Sampler):
        def __init__(self, process: "SomethingElse", **common):  # noqa: F821
            super().__init__(process, **common)

    monkeypatch.setitem(SAMPLERS, "own", Own)
    with pytest.raises(SpecError, match=r"settings of Own cannot be read.*'SomethingElse' is not defined.*TYPE_CHECKING"):
        noisewise.recipe("own", process())


def test_settings_of_the_spec_go_before_common_ones():
    assert noisewise.recipe("uniform:seed=5", process(), seed=1).sampler.seed == 5
    assert noisewise.recipe("uniform", process(), seed=1, draws="antithetic").sampler.draws == "antithetic"


def test_an_older_name_still_means_the_same():
    old, new = (
        noisewise.recipe(f"mix:of=({name}:std=2),floor=0.1+minsnr", process()) for name in ("lognormal", "logit_normal")
    )
    assert torch.equal(old.sample(64).u, new.sample(64).u)
    assert parse("lognormal")[0].name == "logit_normal"


def test_order_and_spaces_do_not_matter():
    one, other = (
        noisewise.recipe("logit_normal:std=2+minsnr", process()),
        noisewise.recipe(" minsnr + logit_normal : std = 2 ", process()),
    )
    assert isinstance(other.sampler, LogitNormal)
    assert one.sampler.std == other.sampler.std == 2
    assert isinstance(other.weighting, MinSNR)


def test_nesting():
    recipe = noisewise.recipe("switch:first=(mix:of=(speed:k=3),floor=0.25),then=(logit_normal:mean=1),at=5+minsnr", process())
    sampler = recipe.sampler
    assert isinstance(sampler, Switch)
    assert isinstance(sampler.first, Mix)
    assert isinstance(sampler.first.of, SpeeD)
    assert (sampler.first.of.k, sampler.first.floor, sampler.then.mean, sampler.at) == (3, 0.25, 1, 5)


def test_product_takes_a_weighting():
    sampler = noisewise.recipe("product:of=uniform,weight=(minsnr:gamma=2+p2)", process()).sampler
    assert isinstance(sampler, Product)
    u = (torch.arange(100) + 0.5) / 100
    expected = weights_of(MinSNR(2.0), u) * weights_of(WEIGHTINGS["p2"](), u)
    torch.testing.assert_close(sampler.density(u), expected / expected.mean(), rtol=1e-4, atol=1e-6)


def test_product_knows_the_prediction():
    u = (torch.arange(100) + 0.5) / 100
    sampler = noisewise.recipe("product:of=uniform,weight=minsnr", Objective(process(), "v")).sampler
    expected = MinSNR().weights(Objective(process(), "v"), u)
    torch.testing.assert_close(sampler.density(u), expected / expected.mean(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "correction"),
    [
        ("product:of=(logit_normal:correction=clipped(5)),weight=minsnr", "clipped(5)"),
        ("product:of=(logit_normal:correction=unbiased),weight=minsnr,correction=none", "none"),
        ("product:of=uniform,weight=minsnr", "none"),
    ],
)
def test_product_corrects_as_its_sampler_does(spec, correction):
    assert str(noisewise.recipe(spec, process()).sampler.correction) == correction


def test_product_draws_as_its_sampler_does():
    made = noisewise.recipe("product:of=(logit_normal:draws=stratified),weight=minsnr", process()).sampler
    assert made.draws == "stratified"


@pytest.mark.parametrize("name", ["adaptive", "loss_adaptive", "loss_moment", "gradient_variance"])
@pytest.mark.parametrize("combinator", ["shift:of={}", "mix:of=(shift:of={})", "product:of={},weight=minsnr"])
def test_some_samplers_take_fixed_densities_only(combinator, name):
    with pytest.raises(ValueError, match=r"takes a fixed density, but .* changes during training"):
        noisewise.recipe(combinator.format(f"({name})"), process())


def test_a_curriculum_of_two_learning_parts_is_refused():
    with pytest.raises(ValueError, match="only one of a curriculum's two parts may change"):
        noisewise.recipe("curriculum:start=adaptive,end=loss_moment,correction=unbiased", process())
    noisewise.recipe("curriculum:start=adaptive,end=logit_normal,correction=unbiased", process())
    noisewise.recipe("curriculum:start=logit_normal,end=adaptive,correction=unbiased", process())


def train(sampler, steps, loss_of=lambda u: 1 + 5 * u):
    for _ in range(steps):
        draw = sampler.sample(64)
        with sampler.observe(draw, loss_of(draw.u)):
            pass


def test_the_warm_up_of_a_part_begins_with_its_turn():
    learning = "loss_adaptive:warmup=20,every=1,strata=4"
    sampler = noisewise.recipe(f"switch:first=uniform,then=({learning}),at=30", process()).sampler
    u = torch.linspace(0.05, 0.95, 19)
    train(sampler, 30)
    assert (sampler.step, sampler.first.step, sampler.then.step) == (30, 30, 0)
    train(sampler, 19)
    assert (sampler.step, sampler.first.step, sampler.then.step) == (49, 30, 19)
    torch.testing.assert_close(sampler.density(u), torch.ones(19))
    train(sampler, 1)
    assert sampler.density(u).max() > 1.1


@pytest.mark.parametrize(("steps", "strata"), [(100, 7), (10, 3), (10, 4), (1000, 17), (100, 1000), (3, 20), (1, 5)])
def test_strata_never_cut_a_timestep(steps, strata):
    schedule = DDPM.linear(steps)
    sampler = noisewise.recipe(f"adaptive:strata={strata},over=u,warmup=0,every=1,floor=0", schedule).sampler
    assert sampler.table.bins == min(strata, steps)
    sampler.propose(torch.arange(1.0, sampler.table.bins + 1))
    inside = torch.linspace(0.01, 0.99, 21)
    density = sampler.density(((torch.arange(steps)[:, None] + inside) / steps).flatten()).view(steps, -1)
    assert bool((density == density[:, :1]).all())
    widths = (sampler.table.widths * steps).round()
    assert widths.max() - widths.min() <= 1


# Targets of learning samplers

CLASSES = {name: getattr(maker, "func", maker) for name, maker in SAMPLERS.items()}
LEARNING = [name for name, made in CLASSES.items() if isinstance(made, type) and issubclass(made, Learner)]


@pytest.mark.parametrize("name", LEARNING)
def test_the_weighting_is_the_target(name):
    objective = Objective(process(), "v")
    recipe = noisewise.recipe(f"{name}+minsnr:gamma=3", objective)
    assert recipe.sampler.target is recipe.weighting
    assert recipe.sampler.objective is objective
    assert noisewise.recipe(name, process()).sampler.objective.prediction == "eps"


@pytest.mark.parametrize("name", LEARNING)
def test_the_target_is_not_part_of_the_state(name):
    with_target, without = noisewise.recipe(f"{name}+learned", process()).sampler, noisewise.recipe(name, process()).sampler
    assert isinstance(with_target.target, Learned)
    assert list(with_target.state_dict()) == list(without.state_dict())
    assert not list(with_target.parameters())


@pytest.mark.parametrize(
    "objective", [None, Objective(process(), "v"), Objective(process(), "x0", "l1")], ids=["none", "v", "l1"]
)
@pytest.mark.parametrize(
    "spec", ["loss_moment:bins=4,history=2", "adaptive:warmup=0,every=1,strata=4", "loss_adaptive:warmup=0,every=1,strata=4"]
)
def test_a_target_is_as_if_the_losses_had_been_weighted(spec, objective):
    told = noisewise.recipe(f"{spec}+minsnr", objective or process()).sampler
    weighted = noisewise.recipe(f"{spec}+none", process()).sampler
    train(told, 20)
    train(weighted, 20, lambda u: MinSNR().weights(objective or Objective(process()), u) * (1 + 5 * u))
    u = torch.linspace(0.05, 0.95, 19)
    torch.testing.assert_close(told.density(u), weighted.density(u), rtol=1e-5, atol=1e-6)
    assert told.density(u).max() > 1.2


def test_the_target_weights_the_gradients_that_are_compared():
    def learn(spec, weight):
        sampler, parameter = (
            noisewise.recipe(f"gradient_variance:strata=4,every=1,rows=8{spec}", process()).sampler,
            torch.ones(1),
        )
        model = torch.nn.Module()
        model.parameter = torch.nn.Parameter(parameter)
        sampler.attach(model)
        noise = torch.randn(16, generator=torch.Generator().manual_seed(0))
        for _ in range(8):
            with sampler.observe(sampler.sample(16), None, lambda rows, u: model.parameter * noise[rows] * weight(u)):
                pass
        return sampler.density(torch.linspace(0.05, 0.95, 19))

    told = learn("+p2", torch.ones_like)
    torch.testing.assert_close(told, learn("", lambda u: WEIGHTINGS["p2"]().weights(Objective(process()), u)))
    assert (told - learn("", torch.ones_like)).abs().max() > 0.2


def test_a_target_of_its_own_goes_first():
    recipe = noisewise.recipe("adaptive:target=(vlb:clip=4)+minsnr", process())
    assert (recipe.sampler.target.clip, type(recipe.weighting)) == (4, MinSNR)
    u = torch.linspace(0.05, 0.95, 19)
    torch.testing.assert_close(recipe.sampler.on_target(u, u), recipe.sampler.target(Objective(process()), u) * u)
    torch.testing.assert_close(recipe.sampler.in_training(u, u), weights_of(MinSNR(), u) * u)


@pytest.mark.parametrize(
    "spec", ["loss_adaptive", "loss_moment", "adaptive:correction=unbiased", "adaptive:estimator=lookahead"]
)
def test_no_weighting_no_target(spec):
    assert noisewise.recipe(spec, process()).sampler.target is None


def test_a_weighting_of_none_is_not_the_same_as_no_weighting_for_a_sampler_with_a_target_of_its_own():
    assert isinstance(noisewise.recipe("adaptive", process()).sampler.target, MinSNR)
    assert isinstance(noisewise.recipe("adaptive+none", process()).sampler.target, NoWeight)
    assert isinstance(noisewise.recipe("adaptive+p2", process()).sampler.target, P2)


@pytest.mark.parametrize(
    "spec",
    ["mix:of=adaptive,floor=0.1+minsnr", "switch:first=uniform,then=adaptive,at=5+minsnr", "mix:of=(mix:of=adaptive)+minsnr"],
)
def test_a_learning_sampler_inside_another_gets_target_and_prediction(spec):
    recipe = noisewise.recipe(spec, Objective(process(), "v"))
    inner = next(module for module in recipe.sampler.modules() if isinstance(module, AdaptiveSampler))
    assert inner.objective.prediction == "v"
    assert isinstance(inner.target, MinSNR)


# Errors


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("unifrom", r"unknown sampler or weighting 'unifrom': did you mean 'uniform'\?"),
        ("logit_normal+minsrn", r"did you mean 'minsnr'\?"),
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
        ("speed+logit_normal", "names two samplers, speed and logit_normal; use mix, switch or product"),
        ("mix:floor=0.1", "mix needs of, as in mix:of="),
        ("switch:first=uniform", "switch needs then, at"),
        ("product:of=uniform", "product needs weight"),
        ("minsnr:gamma=abc", "gamma=abc: expected a number$"),
        ("minsnr:gamma=none", "gamma=none: expected a number$"),
        ("adaptive:every=none", "every=none: expected a number$"),
        ("speed:mirror=maybe", "mirror=maybe: expected true or false$"),
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
        noisewise.recipe(spec, process())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("minsnr:gamma=-1", "gamma must be positive"),
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
        noisewise.recipe(spec, process())


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
names = words.filter(lambda word: not word[0].isdigit())  # of terms and settings; a:b=1e+2 is a number
values = st.one_of(words, words.map(lambda word: f"({word}:x=1,y=2+{word})"))
terms = st.builds(Term, names, st.dictionaries(names, values, max_size=3))


def written(term):
    options = ",".join(f"{key}={value}" for key, value in term.options.items())
    return f"{term.name}:{options}" if options else term.name


@given(terms=st.lists(terms, min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_parse_reads_what_was_written(terms):
    assert parse("+".join(map(written, terms))) == terms


# Processes


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("linear", DDPM.linear(1000)),
        ("linear:steps=4000", DDPM.linear(4000)),
        ("linear:steps=1e2", DDPM.linear(100)),
        ("cosine:steps=50,offset=0.01", DDPM.cosine(50, offset=0.01)),
        ("quadratic:beta_start=0.00085,beta_end=0.012", DDPM.quadratic(1000, 0.00085, 0.012)),
        ("vp:beta_max=10", VP(beta_max=10)),
        ("ve:sigma_min=0.5,sigma_max=3", VE(0.5, 3)),
        ("edm:mean=0,std=1", EDM(0, 1)),
        ("flow:time_scale=1000", Flow(1000)),
        (" flow : time_scale = 7 ", Flow(7)),
    ],
)
def test_a_process_with_its_settings(spec, expected):
    made, u = build_process(spec), torch.linspace(0.01, 0.99, 33)
    assert type(made) is type(expected)
    assert torch.equal(made.time(u), expected.time(u))
    assert torch.equal(made.log_snr(u), expected.log_snr(u))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("linaer", r"unknown process 'linaer': did you mean 'linear'\? Known: cosine, edm, flow, linear, quadratic, ve, vp"),
        ("uniform", "unknown process 'uniform'"),
        ("linear+cosine", "should name one process, as in linear:steps=1000"),
        ("linear+minsnr", "should name one process"),
        ("linear:stps=4", r"unknown setting of linear 'stps': did you mean 'steps'\? Known: beta_end, beta_start, steps"),
        ("linear:cls=4", "unknown setting of linear 'cls'"),
        ("edm:name=x", "unknown setting of edm 'name'"),
        ("linear:steps=many", "steps=many: expected a number"),
        ("linear:steps=10.5", r"steps=10\.5: expected a whole number"),
        ("linear:steps=inf", "steps=inf: expected a whole number"),
        ("linear:steps=nan", "steps=nan: expected a whole number"),
        ("linear:steps=none", "steps=none: expected a number$"),
        ("", "a name is missing"),
    ],
)
def test_a_process_that_cannot_be_understood_is_explained(spec, message):
    with pytest.raises(SpecError, match=message):
        build_process(spec)


# Lists of specs


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("uniform", ["uniform"]),
        ("uniform,p2", ["uniform", "p2"]),
        (" uniform , p2 ", ["uniform", "p2"]),
        ("uniform,adaptive:floor=0.1,every=20,p2", ["uniform", "adaptive:floor=0.1,every=20", "p2"]),
        ("speed:k=5,tau=3,speed:k=2", ["speed:k=5,tau=3", "speed:k=2"]),
        ("mix:of=(speed:k=5,tau=3),floor=0.1,uniform", ["mix:of=(speed:k=5,tau=3),floor=0.1", "uniform"]),
        ("mix:floor=0.1,of=(speed:k=5),minsnr+speed:k=5", ["mix:floor=0.1,of=(speed:k=5)", "minsnr+speed:k=5"]),
        ("product:of=uniform,weight=p2+minsnr:gamma=3,speed", ["product:of=uniform,weight=p2+minsnr:gamma=3", "speed"]),
    ],
)
def test_a_list_of_specs(text, specs):
    assert split_specs(text) == specs


@pytest.mark.parametrize("text", ["", " ", "uniform,", ",uniform", "uniform,,p2"])
def test_an_empty_place_in_a_list_is_refused(text):
    with pytest.raises(SpecError, match="has an empty place between its commas"):
        split_specs(text)


@given(several=st.lists(st.lists(terms, min_size=1, max_size=3), min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
def test_a_list_is_split_into_the_specs_it_was_made_of(several):
    specs = ["+".join(map(written, one)) for one in several]
    assert split_specs(",".join(specs)) == specs


def test_a_recipe_taken_for_its_sampler_says_what_to_write():
    recipe = noisewise.recipe("logit_normal+minsnr:gamma=5", DDPM.linear())
    with pytest.raises(AttributeError, match=r"write recipe\.sampler\.density$"):
        recipe.density(torch.ones(1))
    with pytest.raises(AttributeError, match=r"write recipe\.weighting\.weighted$"):
        recipe.weighted(torch.ones(1), None, torch.ones(1))
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        recipe.nothing()
    assert copy.deepcopy(recipe).spec == pickle.loads(pickle.dumps(recipe)).spec == recipe.spec


def test_arguments_in_the_wrong_order_are_named():
    with pytest.raises(TypeError, match=r"recipe takes the spec first.*then the objective; got DDPM"):
        noisewise.recipe(DDPM.linear(), "adaptive")
    with pytest.raises(TypeError, match=r"Uniform is made already: Recipe\(sampler\)"):
        noisewise.recipe(noisewise.SAMPLERS["uniform"](DDPM.linear()), DDPM.linear())
    with pytest.raises(TypeError, match=r"the second argument must be a Process.*got 'adaptive'$"):
        noisewise.recipe("uniform", "adaptive")
    with pytest.raises(TypeError, match=r"build_process\('linear'\) makes one$"):
        noisewise.recipe("uniform", "linear")
