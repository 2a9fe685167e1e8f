"""Speed of training, generation and evaluation on one H200."""

from statistics import fmean
from typing import Any

from . import RESULTS, rows, table

MODELS = ("small", "paper")
BASELINE, FAST, PLAIN, OTHER = "script, fp32", "fast", "plain", "plain, another seed"
PROFILES = "step_profile.jsonl"
Rows = list[dict[str, Any]]


def speeds(model: str, file: str = "throughput.jsonl") -> Rows:
    """The paths that were measured, in the order of the file."""
    return [row for row in rows(file) if row["model"] == model and "steps_per_second" in row]


def profiled(model: str) -> dict[str, Any]:
    """The newest step of which all kernels are known, alone on the GPU."""
    found = [row for row in speeds(model, PROFILES) if row["path"] == FAST and "kernels" in row and not row["mps"]]
    return found[-1]


def curves() -> dict[str, dict[int, float]]:
    """Path to step to loss."""
    found: dict[str, dict[int, float]] = {}
    for row in rows("loss_curves.jsonl"):
        if "loss" in row:
            found.setdefault(row["path"], {})[row["step"]] = row["loss"]
    return found


def millions(parameters: int) -> str:
    return f"{parameters / 1e6:.1f} M"


def paths(model: str) -> str:
    """Steps a second of every path with one network."""
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


TRANSFORMERS = {"dit-b": "DiT-B/2", "dit-xl": "DiT-XL/2", "uvit-h": "U-ViT-H/2"}
OF_TRANSFORMERS = "throughput_transformers.jsonl"


def transformers() -> str:
    """Steps a second of transformers on every path that was measured."""
    if not (RESULTS / OF_TRANSFORMERS).exists():
        return "Not measured yet."
    heads = ["network", "path", "steps a second (slowest to fastest)", "10^12 operations a second", "set-up", "GPU memory"]
    lines = [
        [
            f"{name}, {millions(row['parameters'])}",
            f"`{row['path']}`",
            f"{row['steps_per_second']:.2f} ({row['slowest']:.2f} to {row['fastest']:.2f})",
            f"{row['tflops']:.0f}",
            f"{row['setup_seconds']:.0f} s" if "setup_seconds" in row else "",
            f"{row['memory_gib']:.1f} GiB",
        ]
        for model, name in TRANSFORMERS.items()
        for row in speeds(model, OF_TRANSFORMERS)
    ]
    return table(heads, lines)


def probes() -> str:
    """What a step costs with samplers that probe the network, over uniform's."""
    lines = [
        [f"`{row['spec']}`", f"{row['ratio']:.2f}", f"{row['by_samples']:.2f}", str(row["recorded"])]
        for row in rows("probe_cost.jsonl")
        if row["spec"] != "uniform"
    ]
    return table(["sampler", "step over uniform's", "by its samples alone", "recordings"], lines)


def earlier_paths() -> str:
    """Steps a second in two runs before, on other machines and with other versions."""
    shown = {"throughput_earlier": (BASELINE, FAST, "fast, benchmark"), "throughput_any_order": (FAST, "graphs")}
    lines = []
    for file, chosen in shown.items():
        for path in chosen:
            found = [row for model in MODELS for row in speeds(model, f"{file}.jsonl") if row["path"] == path]
            lines.append([f"`{file}.jsonl`", f"`{path}`", *(f"{row['steps_per_second']:.1f}" for row in found)])
    return table(["file", "path", *(millions(speeds(model)[0]["parameters"]) for model in MODELS)], lines)


def set_up() -> str:
    """Seconds before the first step."""
    found = [row for row in rows("throughput.jsonl") if "caches" in row]
    seconds = {(row["model"], row["caches"]): row["setup_seconds"] for row in found}
    names = {model: millions(speeds(model)[0]["parameters"]) for model in MODELS}
    lines = [[names[model], *(f"{seconds[model, caches]:.0f} s" for caches in ("empty", "filled"))] for model in MODELS]
    return table(["network", "first run (empty compile caches)", "second run"], lines)


KINDS = {  # the first whose word is in a kernel's name
    "memory set to zero, workspaces": ("Memset", "memset", "init_device_workspace", "FillFunctor"),
    "convolutions, forward": ("fprop",),
    "convolutions, gradient of the input": ("dgrad",),
    "convolutions, gradient of the weights": ("wgrad_indexed", "wgrad_implicit"),
    "convolutions, direction not known": ("ImplicitGemmConvolution", "nhwcAddPadding"),
    "matrix products": ("nvjet", "splitKreduce", "gemm"),
    "attention's weights": ("softmax_",),
    "update": ("multi_tensor_apply",),
    "copies": ("direct_copy_kernel", "Memcpy"),
    "casts alone": ("triton_poi_fused__to_copy_",),
    "sums and other elementwise work, compiled": ("triton_",),
}
NAMES = {"forward": "normalisation", "backward": "normalisation", "move": "update", "prepare": "update"}
OTHERS = "around the network: data, noise, losses, statistics"


def kind_of(kernel: str) -> str:
    found = (kind for kind, words in KINDS.items() if any(word in kernel for word in words))
    if kernel.startswith("triton_poi_fused__to_copy_") and not kernel.removeprefix("triton_poi_fused__to_copy_").isdigit():
        return "sums and other elementwise work, compiled"
    return NAMES.get(kernel) or next(found, OTHERS)


def profile() -> str:
    """What the time of a step goes into, by kind of kernel."""
    found, kinds = {model: profiled(model) for model in MODELS}, dict[str, dict[str, list[float]]]()
    for model, row in found.items():
        for kernel, microseconds, launches in row["kernels"]:
            sums = kinds.setdefault(kind_of(kernel), {}).setdefault(model, [0.0, 0.0])
            sums[0], sums[1] = sums[0] + microseconds, sums[1] + launches
    heads = ["kernels"]
    for row in found.values():
        heads += [f"{millions(row['parameters'])}: µs", "share", "launches"]
    kinds = dict(sorted(kinds.items(), key=lambda item: -item[1]["paper"][0]))
    lines = [[kind, *(cell for model in MODELS for cell in _cells(found[model], *sums[model]))] for kind, sums in kinds.items()]
    whole = (_cells(row, row["microseconds"], row["launches"]) for row in found.values())
    return table(heads, [*lines, ["all", *(cell for cells in whole for cell in cells)]])


def _cells(row: dict[str, Any], microseconds: float, launches: float) -> list[str]:
    return [f"{microseconds:.0f}", f"{100 * microseconds / row['microseconds']:.1f} %", f"{launches:.0f}"]


def changes() -> str:
    """What was changed one after the other, and what came of it."""
    names = {"small": "9.0 M", "paper": "35.7 M", "dit-b": "DiT-B/2"}
    lines = [
        [
            names[row["model"]],
            "" if row["path"] == FAST else f"`{row['path']}`",
            " ".join([row["change"], *(f"`{one}`" for one in row["settings"])]) + (", under MPS" if row["mps"] else ""),
            f"{row['steps_per_second']:.1f}" if row["model"] in MODELS else f"{row['steps_per_second']:.2f}",
            "" if row["launches"] is None else f"{row['launches']:.0f}",
            f"{row['microseconds'] / 1000:.2f} ms",
        ]
        for model in names
        for row in speeds(model, PROFILES)
    ]
    return table(["network", "path, if not `fast`", "change", "steps a second", "launches", "in kernels"], lines)


def sizes() -> str:
    """What the normalisation's kernels take in a step: with the sizes before, by today's rule, and the best of each shape."""
    found: dict[tuple[str, str], list[float]] = {}
    shapes: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows("kernel_sizes.jsonl"):
        shapes.setdefault(tuple(row[name] for name in ("model", "which", "channels", "pixels", "dropout")), []).append(row)
    for (model, which, *_), timed in shapes.items():
        now = next(row for row in timed if row.get("now"))
        before = next((row for row in timed if row.get("before")), now)  # those of norm.py when they were timed
        least = min(row["microseconds"] for row in timed)
        sums = found.setdefault((model, which), [0.0] * 4)
        for place, value in enumerate((before["microseconds"], now["microseconds"], least, before["floor"])):
            sums[place] += before["count"] * value
    names = {"small": "9.0 M", "paper": "35.7 M"}
    lines = [[names[model], which, *(f"{value:.0f}" for value in sums)] for (model, which), sums in found.items()]
    return table(["network", "pass", "before: µs a step", "now", "best size of each shape", "memory alone"], lines)


def loss_curves() -> str:
    """How far the losses of the fast path and of another seed are from the plain path's."""
    found = curves()
    held_out = {row["path"]: row["held_out_mean"] for row in rows("loss_curves.jsonl") if "held_out_mean" in row}
    lines = []
    for path in (PLAIN, FAST, OTHER):
        differences = [100 * (loss / found[PLAIN][step] - 1) for step, loss in found[path].items()]
        sizes = [abs(value) for value in differences]
        above = f"{sum(value > 0 for value in differences)} of {len(differences)}"
        cells = ["", "", ""] if path == PLAIN else [f"{fmean(sizes):.2f} %", f"{max(sizes):.2f} %", above]
        lines.append([path, *cells, f"{held_out[path]:.6f}"])
    heads = ["path", "training loss off `plain`'s, mean", "at most", "above it in", "held-out loss"]
    return table(heads, lines)


WHAT = {"total": "from noise to the FID", "generation": "images alone", "features": "features of the images alone"}
HOW = {
    "fused, graph, first": "recorded, for the first time in a process",
    "fused, graph": "recorded, with our kernels",
    "plain": "kernel by kernel",
}


def generation(which: str = "") -> str:
    """Seconds for 5,000 images and their FID; `short` leaves out other batches, the features and the first time."""
    lines = []
    for row in rows("generation.jsonl"):
        if which == "short" and (row["batch"] != 500 or row["path"].endswith("first")):
            continue
        cells = [row["precision"], row["batch"], f"{row['seconds']:.1f} s", f"{row['memory_gib']:.1f} GiB"]
        lines.append([WHAT[row["part"]], HOW[row["path"]], *cells])
    return table(["what", "how", "precision", "batch", "time", "GPU memory"], lines)


def checkpoint_cost() -> str:
    """What a checkpoint costs the loop, a row for each size and machine."""
    heads = ["parameters", "machine", "load", "a step", "the loop stands still", "of it at work", "a save takes"]
    lines = [
        [
            millions(row["parameters"]),
            f"{row['cores']} CPU cores" if row["device"] == "cpu" else row["machine"],
            f"{row['load']:.0f}",
            *(f"{row[key]:.2f} s" for key in ("step", "stopped", "stopped_cpu", "written")),
        ]
        for row in rows("checkpoint_cost.jsonl")
    ]
    return table(heads, lines)
