"""What a pass did to the gradients that existed before it."""

import pytest
import torch
from torch import nn

from sparsesam.gradients import OldGradient, Treatment


def unchanged(parameter):
    pass


def set_to_none(parameter):
    parameter.grad = None


def filled_with_zeros(parameter):
    parameter.grad.zero_()


def added_to(parameter):
    parameter.sum().backward()


def cleared_and_added_to(parameter):
    parameter.grad = None
    parameter.sum().backward()


@pytest.mark.parametrize(
    ("happens", "treatment"),
    [
        (unchanged, Treatment.UNTOUCHED),
        (set_to_none, Treatment.CLEARED),
        (filled_with_zeros, Treatment.CLEARED),
        (added_to, Treatment.ADDED_TO),
        (cleared_and_added_to, Treatment.CLEARED),
    ],
)
def test_changes_of_gradient_are_detected(happens, treatment):
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    old = OldGradient([parameter])
    happens(parameter)
    old.release()
    assert old.treatment() is treatment


def test_unchanged_zero_gradient_was_not_cleared():
    """For example that of a bias before batch normalization."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.zeros(3)
    old = OldGradient([parameter])
    old.release()
    assert old.treatment() is Treatment.UNTOUCHED


def test_missing_gradient_counts_as_cleared():
    assert OldGradient([nn.Parameter(torch.ones(3))]).treatment() is Treatment.CLEARED
