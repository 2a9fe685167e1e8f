"""What is measured of a finished run: the distance of its images to the data, and its held-out loss at each noise level."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from noisewise.evaluation.distances import Network, choose_network, compare_images, real_statistics
from noisewise.evaluation.heldout import held_out_losses
from noisewise.evaluation.preprocess import to_uint8
from noisewise.training.parts import open_source
from noisewise.training.run import Run


@dataclass(frozen=True)
class Measured:
    """One run, measured."""

    sampler: str
    seed: int
    steps: int
    seconds: float
    steps_per_second: float
    metric: str | None  # what `distance` is: fid, or digits-frechet for the embedded digits
    distance: float | None  # of generated images to the training data; None if it could not be measured
    held_out: list[float]  # loss by noise level, least noise first
    samples: Tensor  # a few images

    def row(self) -> dict[str, Any]:
        """As a row of results.jsonl."""
        return {key: value for key, value in asdict(self).items() if key != "samples"}

    @property
    def loss(self) -> float:
        """The mean over noise levels: what uniform sampling minimises."""
        return sum(self.held_out) / len(self.held_out)


def measure(
    run: Run, *, images: int = 1000, levels: int = 20, heldout: int = 1000, shown: int = 25, tell: Callable[[str], None] = print
) -> Measured:
    """Generate with the averaged weights and compare with the training data; test images give the held-out loss."""
    trainer = run.trainer
    config, device, objective = run.config, trainer.device, trainer.objective
    test, classes = open_source(config, "test"), trainer.parts.classes
    with run.averaged():
        held_out = held_out_losses(trainer.call, objective, test, levels=levels, images=heldout, classes=classes, device=device)
    samples = run.generate(images)
    metric, distance = distance_to_data(run, samples, tell)
    return Measured(
        config.sampler,
        config.seed,
        trainer.step,
        trainer.seconds,
        trainer.step / trainer.seconds,
        metric,
        distance,
        held_out.loss.tolist(),
        samples[:shown].float().cpu(),
    )


def distance_to_data(run: Run, samples: Tensor, tell: Callable[[str], None]) -> tuple[str | None, float | None]:
    """FID, or its like for the digits; nothing for samples that are no images, or without Inception's weights."""
    source, device = run.trainer.parts.source, run.trainer.device
    if not source.image:
        return None, None
    try:
        network: Network = choose_network(source, device)
    except FileNotFoundError as error:
        tell(f"no FID: {error}")
        return None, None
    real = real_statistics(source, network, device)
    found = compare_images([to_uint8(samples)], real, network, device)
    return network.metric, float(found[network.metric])
