"""The privacy loss of many steps, from which tests know what an accountant should say."""

from __future__ import annotations

import math

import numpy as np


class ComposedLoss:
    """The privacy loss of steps of several kinds, by its characteristic function.

    It knows no accountant. With L the loss,
    ``delta(epsilon) = P[L > epsilon] - e^epsilon Q[L > epsilon]``. The sum of independent losses
    has the product of their characteristic functions, which a sum over x gives (the integrand is
    smooth and falls to zero, so the sum converges exponentially), and Gil-Pelaez's formula gives
    the tails from it. Its midpoint sum with steps dt repeats the tail with period 2 pi / dt, sixty
    standard deviations and more here.

    Args:
        kinds: of each kind the losses at some points, the probabilities of these points under P
            and Q, and the number of steps.
    """

    def __init__(self, *kinds):
        mean = sum(n * np.sum(one * loss) for loss, one, _, n in kinds)
        square = sum(
            n * (np.sum(one * loss**2) - np.sum(one * loss) ** 2) for loss, one, _, n in kinds
        )
        self.dt = 2 * math.pi / (60 * math.sqrt(square) + abs(mean))
        blocks, start = [], 0
        while not blocks or np.max(np.abs(blocks[-1][1:])) > 1e-15:
            times = (np.arange(start, start + 256) + 0.5) * self.dt
            both = np.ones((2, 256), complex)
            for loss, one, other, n in kinds:
                wave = np.exp(1j * np.outer(times, loss))
                both *= np.stack([(wave @ one) ** n, (wave @ other) ** n])
            blocks.append(np.stack([times, *both]))
            start += 256
        times, self.one, self.other = np.concatenate(blocks, axis=1)
        self.times = times.real

    def delta(self, epsilon):
        turn = np.exp(-1j * self.times * epsilon) / self.times
        above = [
            0.5 + np.sum(np.imag(turn * transform)) * self.dt / math.pi
            for transform in (self.one, self.other)
        ]
        return above[0] - math.exp(epsilon) * above[1]
