"""The bounds, closed forms and exact small environments behind the group cap.

- `bounds`: what any law of ratios can lose to a cap
- `log_normal`, `lattice`: what log-normal ratios lose, and which group size, ε or sd(ℓ) to choose
- `rates`: Theorem R, its terms and its tuned step size
- `bandit`, `sequences`: environments whose expectations are finite sums
- `delays`: training a small shared policy at an exact lag
- `groups`: estimators on explicit groups

Every statement carries a tag: [PROVEN], with the proof in the docstring; [RECON], our
reconstruction of what the paper (arXiv 2610.01896) must do; [ABS], said by its abstract.
"""
