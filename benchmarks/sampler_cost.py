"""What a sampler costs: time of `sample` and `observe` for a batch, and the memory of its state.

    python benchmarks/sampler_cost.py                        every sampler, batch 1,024, on this machine's CPU
    python benchmarks/sampler_cost.py --device cuda --json benchmarks/results/sampler_cost.jsonl

Medians over many calls; the goal is below 1 ms for `sample` of every static sampler on a CPU.
"""

import argparse
import platform
import statistics
from pathlib import Path

import torch
from rows import append
from timing import seconds

import noisewise
from noisewise import PROCESSES

SPECS = [
    "uniform",
    "logit_normal",
    "mode",
    "cosmap",
    "beta:a=0.6,b=2",
    "edm",
    "laplace",
    "speed",
    "speed:mirror=true",
    "mix:of=speed,floor=0.1",
    "shift:of=logit_normal",
    "product:of=uniform,weight=minsnr",
    "curriculum:start=uniform,end=speed",
    "loss_moment",
    "loss_adaptive+minsnr",
    "adaptive+minsnr",
]


def median_ms(function, repeats: int, device: str) -> float:
    times = [seconds(function, device) for _ in range(repeats)]
    return 1e3 * statistics.median(times[repeats // 10 :])


def measure(spec: str, process: str, draws: str, batch: int, repeats: int, device: str) -> dict:
    sampler = noisewise.recipe(spec, PROCESSES[process](), draws=draws, correction="unbiased").sampler.to(device)
    x0 = torch.zeros(batch, 4, device=device)
    losses = torch.rand(batch, device=device)

    def observe():
        with sampler.observe(draw, losses):
            pass

    draw = sampler.sample(x0)
    sample_ms = median_ms(lambda: sampler.sample(x0), repeats, device)
    observe_ms = median_ms(observe, repeats, device)
    tensors = [*sampler.buffers(), *sampler.parameters()]
    kib = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1024
    row = {"spec": spec, "process": process, "draws": draws, "batch": batch, "device": device}
    return {**row, "sample_ms": round(sample_ms, 4), "observe_ms": round(observe_ms, 4), "state_kib": round(kib, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--process", default="linear", choices=list(PROCESSES))
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    environment = {
        "noisewise": noisewise.__version__,
        "torch": torch.__version__,
        "machine": name,
        "threads": torch.get_num_threads(),
    }
    print(f"{'spec':40s} {'draws':12s} {'sample ms':>10s} {'observe ms':>11s} {'state KiB':>10s}")
    for spec in SPECS:
        for draws in ("independent", "stratified"):
            row = measure(spec, args.process, draws, args.batch, args.repeats, args.device)
            print(
                f"{spec:40s} {draws:12s} {row['sample_ms']:10.3f} {row['observe_ms']:11.3f} {row['state_kib']:10.1f}",
                flush=True,
            )
            if args.json:
                append(args.json, {**row, **environment})


if __name__ == "__main__":
    main()
