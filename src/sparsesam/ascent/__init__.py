"""How the perturbation is computed, and what need not be computed for it."""
