"""top_mask and random scores choose exactly what a full sort, or uniform sampling, would choose."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsesam.distributed.shards import Shards
from sparsesam.masks.patterns import Unstructured
from sparsesam.masks.select import kth_largest_by_digits, top_mask
from tests.masks import pattern_oracle as oracle

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FEW = st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 1e-30, 0.5, 1.0, math.inf])
VALUES = st.one_of(FEW, st.floats(allow_nan=False, width=32), st.integers(-3, 3).map(float))


@st.composite
def score_dicts(draw):
    shapes = draw(st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=4))
    values = draw(st.sampled_from([FEW, VALUES]))
    scores = {}
    for i, shape in enumerate(shapes):
        size = math.prod(shape)
        entries = draw(st.lists(values, min_size=size, max_size=size))
        scores[f"p{i}"] = torch.tensor(entries, dtype=torch.float64).reshape(shape).to(draw(st.sampled_from(DTYPES)))
    return scores


@given(scores=score_dicts(), share=st.floats(0, 1.2))
@settings(deadline=None, max_examples=200)
def test_matches_stable_sort(scores, share):
    count = round(share * sum(tensor.numel() for tensor in scores.values()))
    assert oracle.same(top_mask(scores, count), oracle.top(oracle.as_float64(scores), count))


def hard_distributions(size):
    rng = np.random.default_rng(size)
    normal, place = rng.standard_normal(size), np.arange(size)
    return {
        "equal": np.ones(size),
        "zeros": normal**2 * (rng.random(size) < 0.05),
        "falling": -place,
        "few": rng.integers(0, 5, size),
        "heavy": rng.standard_cauchy(size) ** 5,
        "one peak": np.where(place == size // 3, 1.0, 0.0),
        "infinite": rng.choice([-np.inf, np.inf, 0.0, 1.0], size),
        "never": np.full(size, -np.inf),
    }


KINDS = list(hard_distributions(2))


@pytest.mark.parametrize("kind", KINDS)
def test_threshold_matches_sort_on_host_devices_and_ranks(kind):
    values = torch.from_numpy(hard_distributions(1000)[kind].astype(np.float32))
    scores = {"a": values[:390].view(13, 30), "b": values[390:391].view(()), "c": values[391:]}
    whole, falling = Shards.whole({"a": values}), values.sort(descending=True).values
    for k in [1, 2, 37, 300, 499, 500, 501, 700, 951, 999, 1000]:
        assert oracle.same(top_mask(scores, k), oracle.top(oracle.as_float64(scores), k)), k
        assert kth_largest_by_digits(values, k, whole) == falling[k - 1]


@pytest.mark.parametrize(
    ("scores", "count", "words"),
    [
        *(({"a": torch.zeros(3), "b": torch.tensor([1.0, math.nan])}, k, r"'b'.*NaN") for k in (0, 1, 5)),
        ({"a": torch.zeros(3, dtype=torch.int64)}, 1, "floating point"),
    ],
)
def test_bad_arguments(scores, count, words):
    with pytest.raises(ValueError, match=words):
        top_mask(scores, count)


def test_every_subset_is_equally_likely():
    generator, trials = torch.Generator().manual_seed(0), 5000
    like = {"a": torch.zeros(3), "b": torch.zeros(2)}
    seen = Counter(
        tuple(torch.cat([*Unstructured().draw(like, generator, 0.6).values()]).nonzero().view(-1).tolist())
        for _ in range(trials)
    )
    assert set(seen) == set(itertools.combinations(range(5), 2))
    chi_square = sum((number - trials / 10) ** 2 / (trials / 10) for number in seen.values())
    assert chi_square < 27.9  # 99.9 % quantile with 9 degrees of freedom
