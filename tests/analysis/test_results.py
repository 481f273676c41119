import json
import math
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pytest

from sparsesam.analysis import AnalysisResult


@dataclass(frozen=True)
class Inner(AnalysisResult):
    value: float
    notes: list[str]


@dataclass(frozen=True)
class Outer(AnalysisResult):
    inner: Inner
    maybe: Inner | None
    array: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    named: dict[str, float]
    count: int
    kept: list[object] = field(default_factory=list, metadata={"stored": False})


ARRAYS = np.array([[1.0, math.inf]]), np.array([1, 2])
OUTER = Outer(Inner(math.nan, ["a", "b"]), Inner(2.0, ["b", "c"]), *ARRAYS, {"x": 0.5}, 3, [object()])


def test_result_round_trips_with_nan_for_null():
    again, without = (
        Outer.from_dict(json.loads(json.dumps(result.to_dict(), allow_nan=False)))
        for result in (OUTER, replace(OUTER, maybe=None))
    )
    assert math.isnan(again.inner.value)
    assert again.maybe == Inner(2.0, ["b", "c"])
    assert np.isnan(again.array[0, 1])
    assert (again.array.dtype, again.counts.dtype) == (np.float64, np.int64)
    assert (again.named, again.count, again.kept) == ({"x": 0.5}, 3, [])
    assert without.maybe is None


def test_notes_are_collected_from_all_levels_once():
    assert OUTER.remarks() == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": "many"}, "Outer.count must be of type int, got 'many'"),
        ({"count": True}, "Outer.count must be of type int"),
        ({"inner": 3}, "Inner must be an object, got int"),
        ({"inner": {}}, "Inner has no field 'value'"),
        ({"array": [[1], [1, 2]]}, "Outer.array must be an array of numbers"),
        ({"named": {"x": "y"}}, r"Outer.named\['x'\] must be of type float, got 'y'"),
    ],
)
def test_wrong_type_and_missing_field_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        Outer.from_dict({**OUTER.to_dict(), **change})
