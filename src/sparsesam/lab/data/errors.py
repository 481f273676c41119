"""Errors in the files of a data set."""

from __future__ import annotations


class DataError(ValueError):
    """A file is not what was expected; the message names the file, what was expected and what was found."""


class MissingData(DataError):
    """Files were not found and cannot be downloaded; the message says which to put where, and their checksums."""
