"""Least squares whose coefficients cannot be below 0, as no cost can."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def non_negative(columns: Sequence[Floats], target: Floats, scale: Floats) -> Floats:
    """The coefficients x ≥ 0 that make Σ((Σ columns · x − target) / scale)² least; with `scale` the measured value,
    these are relative errors.

    There are few columns, so every choice of those that are not 0 is tried; the smallest that is best wins.
    """
    matrix, wanted = np.column_stack(columns) / scale[:, None], target / scale
    best, least = np.zeros(len(columns)), float(wanted @ wanted)
    for size in range(1, len(columns) + 1):
        for chosen in combinations(range(len(columns)), size):
            part = matrix[:, chosen]
            found = np.linalg.lstsq(part, wanted, rcond=None)[0]
            misfit = float(np.sum((part @ found - wanted) ** 2))
            if np.all(found >= 0) and misfit < least * (1 - 1e-9):
                best, least = np.zeros(len(columns)), misfit
                best[list(chosen)] = found
    return best
