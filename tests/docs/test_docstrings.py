"""Every public name has a docstring, and its examples run."""

from __future__ import annotations

import doctest
import inspect

import pytest

import sparsesam
from tests.docs.setups import usual


@pytest.mark.parametrize("name", sorted(set(sparsesam.__all__) - {"NORMALIZATION"}))
def test_examples_run(name, tmp_path):
    text = inspect.getdoc(getattr(sparsesam, name))
    assert text, f"{name} has no docstring"
    example = doctest.DocTestParser().get_doctest(text, usual(tmp_path), name, None, None)
    assert doctest.DocTestRunner().run(example).failed == 0
