"""The order of the data, a pure function of (seed, position): nothing to advance or save, and resuming is exact.

Position p is row permutation(epoch)[p mod n] of epoch p // n. The numbers behind it are SplitMix64's, as for the samplers, and
not numpy's, whose permutations may change between its versions.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noisewise.streams import GOLDEN, MASK, bits, stream_key, uniforms

ORDER, FLIP, DROP = 1, 2, 3  # the streams of one seed
HELD = 2  # permutations kept: a batch may span two epochs


def permutation(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order in which the n rows are visited in this epoch."""
    return torch.argsort(bits(stream_key(seed, ORDER, epoch), n), stable=True).numpy()


def decisions(seed: int, stream: int, position: int, count: int, share: float, device: torch.device | str) -> Tensor:
    """For each of `count` positions from this one on, whether something of probability `share` happens to it."""
    key = (stream_key(seed, stream) + position * GOLDEN) & MASK  # the stream of this seed, entered at `position`
    return uniforms(key, count, device) < share


class Order:
    """Which rows lie at which positions; holds at most two permutations."""

    def __init__(self, n: int, seed: int) -> None:
        self.n, self.seed = n, seed
        self.held: dict[int, NDArray[np.int64]] = {}

    def rows(self, position: int, count: int) -> NDArray[np.int64]:
        """The rows at positions position .. position + count."""
        parts = []
        while count:
            epoch, offset = divmod(position, self.n)
            part = self._permutation(epoch)[offset : offset + count]
            parts.append(part)
            position, count = position + len(part), count - len(part)
        return np.concatenate(parts)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self.held:
            while len(self.held) >= HELD:
                del self.held[min(self.held)]
            self.held[epoch] = permutation(self.n, self.seed, epoch)
        return self.held[epoch]
