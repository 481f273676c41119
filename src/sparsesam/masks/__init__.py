"""Which weights are perturbed: scores, patterns, and the masks made of them."""
