"""Every pattern selects what its definition says, entry by entry, and drop_and_grow keeps its budget."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsesam.masks.patterns import NM, PerLayer, Structured, Unstructured, as_pattern
from sparsesam.masks.select import count_true
from tests import cases
from tests.masks import pattern_oracle as oracle

UNITS = ["tensor", "filter", "column"]
FREE = [
    Unstructured(),
    *map(Structured, UNITS),
    Structured("column", "reach"),
    PerLayer(Unstructured()),
    PerLayer(Structured("filter")),
]
FIXED = [
    NM(2, 4),
    NM(2, 4, axis="input"),
    NM(2, 4, axis="filters"),
    NM(1, 3),
    PerLayer(NM(2, 4)),
]
every_pattern = pytest.mark.parametrize("pattern", FREE + FIXED, ids=repr)


def sparsity_of(pattern, sparsity=0.5):
    return None if pattern.implied_sparsity is not None else sparsity


def rand(seed=0, **shapes):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}


# ---- against the naive versions --------------------------------------------------------------------------------------

SHAPES = st.lists(st.lists(st.integers(1, 6), max_size=4).map(tuple), min_size=1, max_size=4)
SHARES = st.one_of(st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.floats(0, 1))
PATTERNS = {
    "unstructured": st.just(Unstructured()),
    "structured": st.builds(Structured, st.sampled_from(UNITS), st.sampled_from(["below", "reach"])),
    "n of m": st.integers(1, 5).flatmap(
        lambda m: st.builds(NM, st.integers(0, m), st.just(m), st.sampled_from(["output", "input", "filters"]))
    ),
}
PATTERNS["per layer"] = st.builds(PerLayer, st.one_of(*PATTERNS.values()))


def score_dicts(shapes, seed, spread, *, has_never, number):
    """``number`` dictionaries of the same names and shapes; integers, so that means and ties are exact."""
    rng = np.random.default_rng(seed)
    for _ in range(number):
        scores = {
            f"p{i}": torch.as_tensor(rng.integers(0, spread + 1, shape)).float() for i, shape in enumerate(shapes)
        }
        never = {name: torch.as_tensor(rng.random(tuple(score.shape)) < 0.1) for name, score in scores.items()}
        yield {name: torch.where(never[name] & has_never, -math.inf, score) for name, score in scores.items()}


@pytest.mark.parametrize("kind", PATTERNS)
@given(
    data=st.data(),
    shapes=SHAPES,
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([1, 4, 1000]),
    has_never=st.booleans(),
    sparsity=SHARES,
    ratio=SHARES,
)
@settings(deadline=None, max_examples=120)
def test_selection_drop_and_growth_equal_definition(kind, data, shapes, seed, spread, has_never, sparsity, ratio):
    pattern = data.draw(PATTERNS[kind])
    sparsity = sparsity_of(pattern, sparsity)
    old, keep, grow = score_dicts(shapes, seed, spread, has_never=has_never, number=3)
    masks = pattern.select(old, sparsity)
    assert oracle.same(masks, oracle.select(pattern, oracle.as_float64(old), sparsity))

    left = oracle.drop(pattern, oracle.as_float64(keep), oracle.as_flags(masks), ratio)
    by_score = pattern.drop_and_grow(masks, keep, grow, sparsity=sparsity, ratio=ratio)
    assert oracle.same(by_score, oracle.select(pattern, oracle.as_float64(grow), sparsity, left))

    at_random = pattern.drop_and_grow(masks, keep, torch.Generator().manual_seed(seed), sparsity=sparsity, ratio=ratio)
    assert all(np.all(at_random[name].numpy() | ~left[name]) for name in masks)
    if "reach" not in repr(pattern):  # a mask is allowed if it is what is selected when nothing else may be
        alone = {name: np.where(mask, 1.0, -math.inf) for name, mask in oracle.as_flags(at_random).items()}
        assert oracle.same(at_random, oracle.select(pattern, alone, sparsity))
    if isinstance(pattern, Unstructured) and not has_never:
        assert (
            count_true(at_random) == count_true(masks) == round((1 - sparsity) * sum(s.numel() for s in old.values()))
        )


def test_many_members_per_group():
    scores = {"w": torch.randint(0, 9, (600, 2)).float()}
    assert oracle.same(NM(37, 300).select(scores), oracle.select(NM(37, 300), oracle.as_float64(scores), None))


def test_infinities_of_both_signs_exclude_unit():
    scores = {"w": torch.tensor([[math.inf, -math.inf], [1.0, 1.0]])}
    assert Structured("filter").select(scores, 0.0)["w"].tolist() == [[False, False], [True, True]]


@every_pattern
def test_layout_and_dtype_of_scores_do_not_matter(pattern):
    scores = torch.randint(0, 50, (8, 4, 3, 3)).float()
    plain = pattern.select({"w": scores}, sparsity_of(pattern, 0.4))["w"]
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        other = scores.to(dtype).to(memory_format=torch.channels_last)
        mask = pattern.select({"w": other}, sparsity_of(pattern, 0.4))["w"]
        assert mask.is_contiguous()
        assert torch.equal(mask, plain)


@every_pattern
def test_nothing_to_select_from(pattern):
    empty = {"w": torch.zeros(0, 4), "v": torch.zeros(4, 0)}
    masks = pattern.select(empty, sparsity_of(pattern))
    assert {name: mask.shape for name, mask in masks.items()} == {"w": (0, 4), "v": (4, 0)}
    assert pattern.select({}, sparsity_of(pattern)) == {}


# ---- dropping and growing --------------------------------------------------------------------------------------------


def test_random_draw_of_units_ignores_their_size():
    """A mean of many draws would hardly ever be the largest; one draw per unit gives each its chance."""
    generator, like, seen = torch.Generator().manual_seed(0), rand(wide=(10, 50), slim=(10, 2)), torch.zeros(20)
    for _ in range(400):
        masks = Structured("filter", "reach").draw(like, generator, 1 - 1 / 520)  # one unit
        seen += torch.cat([masks["wide"][:, 0], masks["slim"][:, 0]]).float()
    assert 4 < float(seen.min()) <= float(seen.max()) < 45


def test_budget_follows_changed_sparsity():
    masks = Unstructured().select(rand(w=(31, 17), b=(13,)), 0.5)
    for sparsity in (0.2, 0.37, 0.8):
        keep = rand(1, w=(31, 17), b=(13,))
        masks = Unstructured().drop_and_grow(masks, keep, torch.Generator(), sparsity=sparsity, ratio=0.3)
        assert count_true(masks) == round((1 - sparsity) * 540)


@every_pattern
def test_same_seed_gives_same_mask_and_inputs_are_unchanged(pattern):
    like, options = rand(w=(40, 30), b=(13,)), {"sparsity": sparsity_of(pattern), "ratio": 0.4}
    masks = pattern.select(like, sparsity_of(pattern))
    once, again = (pattern.drop_and_grow(masks, like, torch.Generator().manual_seed(5), **options) for _ in range(2))
    assert cases.same_bits(once.values(), again.values())
    assert cases.same_bits(masks.values(), pattern.select(like, sparsity_of(pattern)).values())


# ---- errors ----------------------------------------------------------------------------------------------------------

W, BOOL = {"w": torch.rand(4, 4)}, {"w": torch.ones(4, 4, dtype=torch.bool)}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Unstructured().select(W), "sparsity must be given"),
        (lambda: NM(2, 4).select(W, 1.2), r"sparsity must be in \[0, 1\]"),
        (lambda: Unstructured().select(W, math.nan), r"sparsity must be in \[0, 1\]"),
        (lambda: NM(2, 4).select(W, 0.9), "sparsity must be left out"),
        (lambda: NM(0, 0), "m must be an integer of at least 1"),
        (lambda: NM(5, 4), "n must be"),
        (lambda: NM(2, 4, axis="rows"), "axis must be one of"),
        (lambda: Structured("layer"), "unit must be one of"),
        (lambda: Structured("tensor", "above"), "rounding must be one of"),
        (
            lambda: Structured().drop_and_grow({"w": torch.eye(4) > 0}, W, W, sparsity=0.5, ratio=0.5),
            "part of a filter",
        ),
        (lambda: as_pattern("filtre"), "did you mean filter"),
        (lambda: as_pattern("2:4 inputs"), "did you mean 2:4 input"),
    ],
)
def test_bad_arguments(call, words):
    with pytest.raises(ValueError, match=words):
        call()


NAN = {"a": torch.rand(4, 4), "b": torch.full((4, 4), math.nan)}
NOTHING = {name: torch.zeros(4, 4, dtype=torch.bool) for name in NAN}


@every_pattern
@pytest.mark.parametrize(
    ("masks", "keep", "grow", "ratio", "words"),
    [
        (BOOL, W, W, math.nan, r"ratio must be in \[0, 1\]"),
        (BOOL, {"v": W["w"]}, W, 0.5, "keep must have the same names"),
        (BOOL, W, {"w": torch.rand(4)}, 0.5, r"grow.*shape"),
        (W, W, W, 0.5, "bool"),
        (NOTHING, NAN, torch.Generator(), 0.5, r"'b'.*NaN"),  # also where nothing is kept
    ],
)
def test_bad_masks_scores_and_ratios(pattern, masks, keep, grow, ratio, words):
    with pytest.raises(ValueError, match=words):
        pattern.drop_and_grow(masks, keep, grow, sparsity=sparsity_of(pattern), ratio=ratio)


def test_names():
    known = {
        "unstructured": Unstructured(),
        **{unit: Structured(unit) for unit in UNITS},
        "tensor reach": Structured("tensor", "reach"),
        "2:4": NM(2, 4),
        "1:8 input": NM(1, 8, axis="input"),
        "2:4 filters": NM(2, 4, axis="filters"),
    }
    assert {name: as_pattern(name) for name in known} == known
    assert as_pattern(known["2:4"]) is known["2:4"]
