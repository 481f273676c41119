"""Argument checks, batches, random states and the restoring of models, shared by the whole library."""
