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
from sparsesam.masks.select import kth_largest, kth_largest_by_digits, top_mask
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
        "zeros 30 %": normal**2 * (rng.random(size) > 0.3),
        "periodic": place % 16,
        "rising": place,
        "falling": -place,
        "few": rng.integers(0, 5, size),
        "heavy": rng.standard_cauchy(size) ** 5,
        "one peak": np.where(place == size // 3, 1.0, 0.0),
        "infinite": rng.choice([-np.inf, np.inf, 0.0, 1.0], size),
        "never": np.full(size, -np.inf),
        "two blocks": np.r_[rng.random(size // 2), 1e6 + rng.random(size - size // 2)],
    }


KINDS = list(hard_distributions(2))


@pytest.mark.parametrize("kind", KINDS)
def test_hard_distributions(kind):
    values = torch.from_numpy(hard_distributions(1000)[kind].astype(np.float32))
    scores = {"a": values[:390].view(13, 30), "b": values[390:391].view(()), "c": values[391:]}
    for count in [0, 1, 2, 37, 300, 499, 500, 501, 700, 951, 999, 1000]:
        assert oracle.same(top_mask(scores, count), oracle.top(oracle.as_float64(scores), count)), count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1000, 200_000])
def test_threshold_matches_sort_on_host_devices_and_ranks(kind, size):
    values = torch.from_numpy(hard_distributions(size)[kind].astype(np.float32))
    whole, falling = Shards.whole({"a": values}), values.sort(descending=True).values
    every = {"a": torch.ones(size, dtype=torch.bool)}
    for k in (1, 2, size // 3, size // 2, size - 49, size):
        assert kth_largest({"a": values}, every, k, whole) == falling[k - 1]
        assert kth_largest_by_digits(values, k, whole) == falling[k - 1]


def test_mixed_dtypes_are_compared_as_numbers():
    scores = {
        "half": torch.tensor([1.0], dtype=torch.float16),
        "wide": torch.tensor([1.0 + 1e-12, 1.0 - 1e-12], dtype=torch.float64),
        "brain": torch.tensor([1.0], dtype=torch.bfloat16),
    }
    chosen = [torch.cat([mask.view(-1) for mask in top_mask(scores, k).values()]).tolist() for k in (1, 2, 3)]
    assert chosen == [[False, True, False, False], [True, True, False, False], [True, True, False, True]]


@pytest.mark.parametrize(
    ("scores", "count", "words"),
    [
        *(({"a": torch.zeros(3), "b": torch.tensor([1.0, math.nan])}, k, r"'b'.*NaN") for k in (0, 1, 5)),
        ({"a": torch.zeros(3)}, -1, "count must be at least 0"),
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
