"""What can be wrong with a data set's files."""

from __future__ import annotations


class DataError(ValueError):
    """A file is not what its place and name promise; the message says which, what was expected and what was found."""


class MissingData(DataError):
    """Files are neither here nor to be had; the message says which to put where, and their checksums."""
