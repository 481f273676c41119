"""Moves weights to w + e and back; e follows a gradient, the base optimizer's momentum or its last update."""
