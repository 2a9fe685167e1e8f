"""Draws the pictures of docs/speed.md and fills in its tables, from the files in benchmarks/results and nothing else.

Run `python docs/make_speed_figures.py` when those files have changed; it needs matplotlib.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from pages import RESULTS, fill_in, rows

from noisewise.looking.palette import COLOURS

DOCS = Path(__file__).parent
PAGE = DOCS / "speed.md"
WIDTH, DPI = 8.4, 130  # 1092 pixels
MODELS = ("small", "paper")
BASELINE, FAST, PLAIN, OTHER = "script, fp32", "fast", "plain", "plain, another seed"
SLOW, RECORDED, OURS = "#9a9a9a", COLOURS[5], COLOURS[0]
PATHS = {"graphs": RECORDED, "fast": OURS, "fast, adaptive": OURS}
Rows = list[dict[str, Any]]


def speeds(model: str) -> Rows:
    """The paths that were measured, in the order of the file."""
    return [row for row in rows("throughput.jsonl") if row["model"] == model and "steps_per_second" in row]


def profile() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / "step_profile.json").read_text())["models"]
    return found


def curves() -> dict[str, dict[int, float]]:
    """Path to step to loss."""
    found: dict[str, dict[int, float]] = {}
    for row in rows("loss_curves.jsonl"):
        if "loss" in row:
            found.setdefault(row["path"], {})[row["step"]] = row["loss"]
    return found


def millions(parameters: int) -> str:
    return f"{parameters / 1e6:.1f} M"


# Pictures --------------------------------------------------------------------------------------------------------------


def save(figure: plt.Figure, name: str) -> None:
    path = DOCS / "img" / f"{name}.png"
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    plt.close(figure)
    print(f"{path.relative_to(DOCS.parent)}: {path.stat().st_size / 1024:.0f} KiB")


def draw_paths() -> None:
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 3.3), sharey=True, layout="constrained")
    for ax, model in zip(axes, MODELS, strict=True):
        found = speeds(model)
        rates = {row["path"]: row["steps_per_second"] for row in found}
        ax.barh(range(len(rates)), list(rates.values()), 0.7, color=[PATHS.get(path, SLOW) for path in rates])
        for y, (path, rate) in enumerate(rates.items()):
            ratio = "" if path == BASELINE else f"  ({rate / rates[BASELINE]:.2f}×)"
            ax.text(rate + 0.01 * max(rates.values()), y, f"{rate:.1f}{ratio}", va="center", fontsize=9)
        ax.set_xlim(0, 1.38 * max(rates.values()))
        ax.set_title(f"U-Net of {millions(found[0]['parameters'])} parameters", fontsize=10)
        ax.set_yticks(range(len(rates)), list(rates))
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    row = speeds(MODELS[0])[0]
    figure.suptitle(f"Training steps a second, and how many times the fp32 script's ({row['machine']}, batch {row['batch']})")
    save(figure, "speed_paths")


def draw_losses() -> None:
    found = curves()
    plain = found[PLAIN]
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(WIDTH, 4.8), sharex=True, height_ratios=[1.2, 1], layout="constrained")
    upper.plot(list(plain), list(plain.values()), color="black", lw=1.2, label="plain path")
    upper.plot(list(found[FAST]), list(found[FAST].values()), "o", color=OURS, ms=3.5, label="fast path, same seed")
    upper.set_yscale("log")
    upper.yaxis.set_major_locator(FixedLocator([0.03, 0.05, 0.1, 0.2, 0.5, 1]))
    upper.yaxis.set_minor_locator(NullLocator())
    upper.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    upper.set_ylabel("training loss (log scale)")
    upper.set_title("9.0 M network on CIFAR-10, uniform sampling; means of 50 steps", fontsize=10.5)
    upper.legend(frameon=False)
    for path, colour, label in ((OTHER, SLOW, "plain path, another seed"), (FAST, OURS, "fast path, same seed")):
        difference = [100 * (loss / plain[step] - 1) for step, loss in found[path].items()]
        lower.plot(list(found[path]), difference, "o-", color=colour, ms=3, lw=1, label=label)
    lower.axhline(0, color="black", lw=0.8)
    lower.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g} %" if value else "0"))
    lower.set_ylabel("loss over that of the\nplain path, less 1")
    lower.set_xlabel("training step")
    lower.set_xlim(0, max(plain) + 30)
    lower.legend(frameon=False, ncols=2, loc="upper right", bbox_to_anchor=(1, 1.2))
    for ax in (upper, lower):
        ax.spines[["top", "right"]].set_visible(False)
    save(figure, "speed_losses")


# Tables ----------------------------------------------------------------------------------------------------------------


def table(heads: list[str], lines: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in [heads, ["---"] * len(heads), *lines]]


def table_paths(model: str) -> list[str]:
    found = speeds(model)
    base = next(row["steps_per_second"] for row in found if row["path"] == BASELINE)
    heads = ["path", "steps a second (slowest to fastest)", "times `script, fp32`", "images a second"]
    lines = [
        [
            f"`{row['path']}`",
            f"{row['steps_per_second']:.1f} ({row['slowest']:.1f} to {row['fastest']:.1f})",
            f"{row['steps_per_second'] / base:.2f}",
            f"{row['images_per_second']:.0f}",
            f"{100 * row['share_of_floor']:.1f} %",
            f"{row['memory_gib']:.1f} GiB",
        ]
        for row in found
    ]
    return table([*heads, "of the arithmetic peak", "GPU memory"], lines)


def table_setup() -> list[str]:
    found = [row for row in rows("throughput.jsonl") if "caches" in row]
    seconds = {(row["model"], row["caches"]): row["setup_seconds"] for row in found}
    names = {model: millions(speeds(model)[0]["parameters"]) for model in MODELS}
    lines = [[names[model], *(f"{seconds[model, caches]:.0f} s" for caches in ("empty", "filled"))] for model in MODELS]
    return table(["network", "first run (empty compile caches)", "second run"], lines)


def table_profile() -> list[str]:
    found = profile()
    kinds = sorted(found["paper"]["kinds"], key=lambda kind: -found["paper"]["kinds"][kind]["microseconds"])
    kinds.sort(key=lambda kind: "not listed" in kind)  # stays last
    heads = ["kernels"]
    for model in MODELS:
        name = millions(found[model]["parameters"])
        heads += [f"{name}: µs", "share", "launches"]
    lines = [
        [kind, *(cell for model in MODELS for cell in _cells(found[model], found[model]["kinds"][kind]))] for kind in kinds
    ]
    lines.append(["all", *(cell for model in MODELS for cell in _cells(found[model], found[model]))])
    return table(heads, lines)


def _cells(whole: dict[str, Any], part: dict[str, Any]) -> list[str]:
    share = part["microseconds"] / whole["microseconds"]
    return [f"{part['microseconds']:.0f}", f"{100 * share:.1f} %", f"{part['launches']:.0f}"]


def table_generation() -> list[str]:
    lines = []
    for row in rows("generation.jsonl"):
        what = {
            "total": "from noise to the FID",
            "generation": "images alone",
            "features": "features of the images alone",
        }[row["part"]]
        how = {
            "fused, graph, first": "recorded, for the first time in a process",
            "fused, graph": "recorded, with our kernels",
            "plain": "kernel by kernel",
        }[row["path"]]
        lines.append(
            [what, how, row["precision"], str(row["batch"]), f"{row['seconds']:.1f} s", f"{row['memory_gib']:.1f} GiB"]
        )
    return table(["what", "how", "precision", "batch", "time", "GPU memory"], lines)


TABLES: dict[str, Callable[[], list[str]]] = {
    "paths, small": lambda: table_paths("small"),
    "paths, paper": lambda: table_paths("paper"),
    "set-up": table_setup,
    "profile": table_profile,
    "generation": table_generation,
}


def main() -> None:
    plt.rcParams.update({"font.size": 9.5, "figure.facecolor": "white"})
    (DOCS / "img").mkdir(exist_ok=True)
    draw_paths()
    draw_losses()
    fill_in(PAGE, TABLES)


if __name__ == "__main__":
    main()
