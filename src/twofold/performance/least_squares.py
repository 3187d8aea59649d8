"""Least squares whose coefficients cannot be below 0, as no cost can."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_RIDGE = 1e-12


def non_negative(columns: Sequence[Floats], target: Floats, scale: Floats) -> Floats:
    """The coefficients x ≥ 0 that make Σ((Σ columns · x − target) / scale)² least; with `scale` the measured value,
    these are relative errors.

    There are few columns, so every choice of those that are not 0 is tried; the smallest that is best wins.
    """
    matrix, wanted = np.column_stack(columns) / scale[:, None], target / scale
    sizes = np.linalg.norm(matrix, axis=0)
    used = np.flatnonzero(sizes)
    unit = matrix[:, used] / sizes[used]
    # The ridge, which is nothing beside the unit diagonal, lets choices of columns that say the same be solved too.
    products, shares = unit.T @ unit + _RIDGE * np.eye(len(used)), unit.T @ wanted
    best, least = np.zeros(len(columns)), float(wanted @ wanted)
    for size in range(1, len(used) + 1):
        chosen = np.array(list(combinations(range(len(used)), size)))
        found = np.linalg.solve(products[chosen[:, :, None], chosen[:, None, :]], shares[chosen][..., None])[
            ..., 0
        ]
        feasible = np.flatnonzero(np.all(found >= 0, axis=1))
        if not len(feasible):
            continue
        misfits = wanted @ wanted - np.einsum("ij,ij->i", found[feasible], shares[chosen[feasible]])
        nearest = int(np.argmin(misfits))
        if misfits[nearest] < least * (1 - 1e-9):
            least, which = float(misfits[nearest]), feasible[nearest]
            best = np.zeros(len(columns))
            best[used[chosen[which]]] = found[which] / sizes[used[chosen[which]]]
    return best
