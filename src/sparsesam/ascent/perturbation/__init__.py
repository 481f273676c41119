"""Moves weights to w + e and back: e from a gradient, from the base optimizer's momentum, or from its last update."""
