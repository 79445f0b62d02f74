"""Nine trajectories of three groups, interleaved: sizes 4, 3 and 2, two of them above the cap."""

from __future__ import annotations

GROUPS = [7, 3, 7, 12, 3, 7, 12, 7, 3]
LOG_RATIOS = [0.1, -0.4, 1.5, 3.0, 0.2, -2.0, -0.3, 0.9, -0.1]
ADVANTAGES = [1.0, -0.5, 0.0, 2.0, 0.25, -1.0, -2.0, 0.5, 0.25]
