"""SpeeD: A Closer Look at Time Steps is Worthy of Triple Speed-Up for Diffusion Model Training (Wang et al. 2024)."""

from pathlib import Path

from noisewise.papers.evidence import SCALES, Scale, Section, Shown, Study, Table, read

AREAS = ("acceleration", "deceleration", "convergence")
TAU = {"linear": "642", "cosine": "959", "quadratic": "829"}  # the released code's threshold, plus 1


def bounds(folder: Path) -> dict[str, dict[str, tuple[int, int]]]:
    """Schedule to its areas: first timestep, and the first after it."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for row in read(folder / "speed-areas" / "increments.csv"):
        t, areas = int(row["t"]), found.setdefault(row["schedule"], {})
        areas[row["area"]] = (areas.get(row["area"], (t, t))[0], t + 1)
    return found


def shown(folder: Path) -> Shown:
    rows = []
    for schedule, areas in bounds(folder).items():
        size = max(end for _, end in areas.values())
        shares = [f"{(areas[area][1] - areas[area][0]) / size:.1%}" if area in areas else "none" for area in AREAS]
        first = {area: str(areas[area][0]) if area in areas else "none" for area in AREAS}
        rows.append([schedule, TAU[schedule], first["deceleration"], first["convergence"], *shares])
    heads = ["schedule", "authors' code: τ + 1", "ours: t*", "ours: τ", *(f"ours: {area}" for area in AREAS)]
    note = (
        "τ is the first timestep at which √(1 − ᾱ) grows by less than 1e-4. The authors' later code takes 700 for every "
        "schedule. Shares are of uniform sampling."
    )
    pictures = {"Slope of the noise share with the three areas": folder / "speed-areas" / "increments.svg"}
    converged = [f"{schedule} {1 - areas['convergence'][0] / 1000:.1%}" for schedule, areas in bounds(folder).items()]
    said = f"share of timesteps in the convergence area: {', '.join(converged)}"
    return said, [Section("The three areas", [Table(heads, rows, note)], pictures=pictures)]


EXACT = Scale(
    ("analyze increments --schedules linear,cosine,quadratic --out OUT/speed-areas",), "seconds; computed, nothing is trained"
)
STUDIES = {
    "speed-areas": Study(
        source="arXiv 2405.17403, the three areas",
        title="SpeeD's areas of a noise schedule",
        says="noising accelerates, decelerates and converges; a large share of timesteps lies where hardly anything changes",
        scales=dict.fromkeys(SCALES, EXACT),
        shown=shown,
        notes=("The same at every scale: the areas follow from the schedule alone.",),
    )
}
