"""Computes the perturbation, and leaves out what the masks make unnecessary."""
