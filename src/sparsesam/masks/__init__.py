"""Masks of the weights to perturb, made from scores and patterns."""
