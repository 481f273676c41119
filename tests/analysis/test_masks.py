import json
import math

import pytest
import torch

from sparsesam.analysis import masks_over_time


def mask(text):
    return torch.tensor([character == "1" for character in text])


def test_density_overlap_and_ever_perturbed():
    found = masks_over_time([
        (0, {"a": mask("1100"), "b": mask("10")}),
        (5, {"a": mask("1010"), "b": mask("10")}),
        (9, {"a": mask("0000"), "b": mask("00")}),
    ])  # fmt: skip
    assert found.steps == [0, 5, 9]
    assert found.density == pytest.approx([3 / 6, 3 / 6, 0])
    assert found.density_by_layer["a"] == pytest.approx([0.5, 0.5, 0])
    assert found.overlap == pytest.approx([2 / 4, 0])
    assert found.overlap_by_chance[0] == pytest.approx((4 * 0.25 + 2 * 0.25) / (4 * 0.75 + 2 * 0.75))
    assert found.ever == pytest.approx(4 / 6)
    assert found.always == 0


def test_overlap_of_one_snapshot_or_empty_masks_is_undefined():
    assert len(masks_over_time([(0, {"a": mask("10")})]).overlap) == 0
    empty = masks_over_time([(0, {"a": mask("00")}), (1, {"a": mask("00")})])
    assert math.isnan(empty.overlap[0])
    assert json.dumps(empty.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("snapshots", "message"),
    [
        ([], "empty"),
        ([(0, {})], "no masks"),
        ([(0, {"a": mask("1")}), (1, {"b": mask("1")})], "different names or shapes"),
        ([(3, {"a": mask("1")}), (1, {"a": mask("1")})], "order"),
    ],
)
def test_mismatched_snapshots_raise(snapshots, message):
    with pytest.raises(ValueError, match=message):
        masks_over_time(snapshots)
