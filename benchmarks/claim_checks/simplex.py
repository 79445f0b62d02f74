"""A dense simplex method, as an oracle that knows nothing of the closed forms."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def minimise(cost: Array, matrix: Array, bound: Array, basis: list[int]) -> tuple[float, Array]:
    """min cost·x over matrix·x = bound, x ≥ 0, from a feasible basis whose columns are the unit
    matrix; Bland's rule. Returns the optimum and x. Raises ArithmeticError if unbounded."""
    tableau = np.hstack([matrix, bound[:, None]]).astype(float)
    basis = list(basis)
    while True:
        reduced = cost - cost[basis] @ tableau[:, :-1]
        entering = np.flatnonzero(reduced < -1e-12)
        if len(entering) == 0:
            solution = np.zeros(len(cost))
            solution[basis] = tableau[:, -1]
            return float(cost @ solution), solution
        column = entering[0]
        rows = np.flatnonzero(tableau[:, column] > 1e-12)
        if len(rows) == 0:
            raise ArithmeticError("the linear programme is unbounded")
        ratio = tableau[rows, -1] / tableau[rows, column]
        tied = rows[ratio <= ratio.min() + 1e-15]
        row = min(tied, key=lambda r: basis[r])
        tableau[row] /= tableau[row, column]
        others = np.arange(len(tableau)) != row
        tableau[others] -= np.outer(tableau[others, column], tableau[row])
        basis[row] = int(column)


def least_distance(ratio: Array, cap: float) -> float:
    """min (1/G)Σ|ρ_i − w_i| over (1/G)Σ|w_i| ≤ c, w of either sign.

    w = p − q and ρ − w = α − β with all four ≥ 0; slack s: Σ(p + q) + s = Gc.
    """
    size = len(ratio)
    unit = np.eye(size)
    nil = np.zeros((1, size))
    one = np.ones((1, size))
    balance = np.hstack([unit, -unit, unit, -unit, np.zeros((size, 1))])
    budget = np.hstack([one, one, nil, nil, np.ones((1, 1))])
    cost = np.concatenate([np.zeros(2 * size), np.ones(2 * size), [0.0]])
    bound = np.append(ratio, size * cap)
    start = [*range(2 * size, 3 * size), 4 * size]
    return minimise(cost, np.vstack([balance, budget]), bound, start)[0] / size


def least_worst_shrink(ratio: Array, cap: float) -> Array:
    """The w ≥ 0, Σw ≤ Gc, that minimises max_i (1 − w_i/ρ_i): maximises t with w_i ≥ ρ_i t."""
    size = len(ratio)
    floor = np.hstack([-np.eye(size), ratio[:, None], np.eye(size), np.zeros((size, 1))])
    budget = np.concatenate([np.ones(size), [0.0], np.zeros(size), [1.0]])
    cost = np.zeros(2 * size + 2)
    cost[size] = -1.0
    bound = np.append(np.zeros(size), size * cap)
    start = list(range(size + 1, 2 * size + 2))
    _, solution = minimise(cost, np.vstack([floor, budget]), bound, start)
    return np.asarray(solution[:size])
