"""Axes: which part of the numbers is shown, where the ticks are, and how numbers are written."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_ROOM = 0.002
LARGEST = 1e140  # beyond it numbers are off the axis
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """Numbers from `low` to `high` on a line from `start` to `end`, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """The place of a number."""
        low, high = self._scaled(self.low), self._scaled(self.high)
        share = (self._scaled(value) - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Round numbers on the axis."""
        if not 0 < self.high - self.low < math.inf:
            return []
        if self.log and self.high > 4 * self.low:
            return self._log_ticks(most)
        step = round_step((self.high - self.low) / most)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(k * step, 12) for k in range(first, last + 1)]

    def _log_ticks(self, most: int) -> list[float]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        every = max(1, math.ceil(len(decades) / most))
        for digits in ((1, 2, 5), (1, 3), (1,)):
            found = [digit * 10.0**k for k in decades for digit in digits]
            shown = [value for value in found if self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9)]
            if len(shown) <= most + 1:
                return shown
        return [value for value in (10.0**k for k in decades[::every]) if self.low <= value <= self.high]

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.log else value


def axis_around(values: Sequence[float], start: float, end: float, *, log: bool = False, zero: bool = False) -> Axis:
    """An axis that shows all values with a little room; `zero` begins it at 0."""
    low, high = (min(max(value, 1 / LARGEST if log else -LARGEST), LARGEST) for value in (min(values), max(values)))
    if log:
        room = max((high / low) ** 0.06, 1.02)
        return Axis(low / room, high * room, start, end, log=True)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    room = max(room, LEAST_ROOM * max(abs(low), abs(high)))  # no drama, and no long numbers, for differences of next to nothing
    return Axis(0.0 if zero else low - room, high + room, start, end)


def round_step(least: float) -> float:
    """The smallest of 1, 2, 2.5 and 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 2.5, 5, 10) if power * digit >= least * (1 - 1e-9))


def tick_text(value: float) -> str:
    """A number on an axis: 0.05, 20k, −2, 10⁻⁵."""
    if value <= 0:
        return "0" if value == 0 else f"−{tick_text(-value)}"
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    if value >= 1e4:
        return f"{value / 1e3:g}k"
    if value >= 1e-3:
        return f"{value:,g}" if value < 1e3 else f"{value:,.0f}"
    mantissa, _, exponent = f"{value:e}".partition("e")
    power = "10" + str(int(exponent)).translate(SUPERSCRIPTS)
    return power if float(mantissa) == 1 else f"{float(mantissa):g}·{power}"


def number(value: float) -> str:
    """A number in a text: four significant digits, all digits before the point."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
