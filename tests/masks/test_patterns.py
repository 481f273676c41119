"""Every pattern selects what its definition says, entry by entry, and drop_and_grow keeps its budget."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsesam.masks.patterns import NM, NMFilters, Pattern, PerLayer, Structured, Unstructured, as_pattern
from sparsesam.masks.patterns.structured import fill_greedily
from sparsesam.masks.select import count_true
from tests.masks import pattern_oracle as oracle

UNITS = ["tensor", "filter", "column"]
SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)
SPARSITY = st.one_of(st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.floats(0, 1))
RATIO = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1))
FREE = [
    Unstructured(),
    *(Structured(unit) for unit in UNITS),
    PerLayer(Unstructured()),
    PerLayer(Structured("filter")),
    Structured("column", "reach"),
]
FIXED = [
    NM(2, 4),
    NM(2, 4, axis="input"),
    NM(1, 3, vectors="none"),
    NMFilters(2, 4),
    NMFilters(1, 2),
    PerLayer(NM(2, 4)),
]


@st.composite
def score_dicts(draw, number=1):
    """``number`` dictionaries of the same names and shapes; integers, so that means and ties are exact."""
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=4))
    spread = draw(st.sampled_from([1, 4, 1000]))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    made = [
        {f"p{i}": torch.as_tensor(rng.integers(0, spread + 1, shape)).float() for i, shape in enumerate(shapes)}
        for _ in range(number)
    ]
    if draw(st.booleans()):
        for scores in made:
            for name, score in scores.items():
                never = torch.from_numpy(np.asarray(rng.random(tuple(score.shape)) < 0.1))
                scores[name] = torch.where(never, -math.inf, score)
    return made[0] if number == 1 else made


def size(scores):
    return sum(score.numel() for score in scores.values())


def finite(scores):
    return {name: score.nan_to_num(neginf=0) for name, score in scores.items()}


given_growth = given(
    made=score_dicts(number=3), sparsity=SPARSITY, ratio=RATIO, random=st.booleans(), seed=st.integers(0, 99)
)


class TestSelect:
    @given(scores=score_dicts(), sparsity=SPARSITY)
    @settings(deadline=None, max_examples=60)
    def test_unstructured_is_global_top(self, scores, sparsity):
        expected = oracle.top(oracle.as_float64(scores), round((1 - sparsity) * size(scores)))
        assert oracle.same(Unstructured().select(scores, sparsity), expected)

    @pytest.mark.parametrize("unit", UNITS)
    @given(scores=score_dicts(), sparsity=SPARSITY)
    @settings(deadline=None, max_examples=60)
    def test_structured_selects_units_greedily(self, unit, scores, sparsity):
        budget = round((1 - sparsity) * size(scores))
        masks = Structured(unit).select(scores, sparsity)
        assert oracle.same(masks, oracle.greedy(oracle.as_float64(scores), unit, budget))
        for name, score in finite(scores).items():
            for index in oracle.units(tuple(score.shape), unit):
                kept = masks[name][index]
                assert bool(kept.all()) == bool(kept.any())
                never = bool((scores[name][index] == -math.inf).any())
                assert kept.all() or never or count_true(masks) + kept.numel() > budget

    @pytest.mark.parametrize("unit", UNITS)
    @given(scores=score_dicts(), sparsity=SPARSITY)
    @settings(deadline=None, max_examples=40)
    def test_units_are_added_until_budget_is_reached(self, unit, scores, sparsity):
        masks = Structured(unit, rounding="reach").select(scores, sparsity)
        budget = round((1 - sparsity) * size(scores))
        assert oracle.same(masks, oracle.greedy(oracle.as_float64(scores), unit, budget, reach=True))
        if all(bool((score > -math.inf).all()) for score in scores.values()):
            assert count_true(masks) >= budget

    @pytest.mark.parametrize(("rounding", "kept"), [("below", 8), ("reach", 40)])
    def test_tensor_that_exceeds_budget_is_last_one_or_left_out(self, rounding, kept):
        scores = {"small": torch.full((8,), 3.0), "large": torch.full((4, 8), 2.0), "tiny": torch.full((9,), 1.0)}
        assert count_true(Structured("tensor", rounding).select(scores, 1 - 16 / 49)) == kept

    @pytest.mark.parametrize("axis", ["output", "input"])
    @pytest.mark.parametrize("vectors", ["dense", "none"])
    @given(scores=score_dicts(), m=st.integers(1, 5), data=st.data())
    @settings(deadline=None, max_examples=60)
    def test_n_of_every_m(self, axis, vectors, scores, m, data):
        scores, n = finite(scores), data.draw(st.integers(0, m))
        masks = NM(n, m, axis=axis, vectors=vectors).select(scores)
        expected = {
            name: oracle.n_of_m(score, n, m, axis, vectors) for name, score in oracle.as_float64(scores).items()
        }
        assert oracle.same(masks, expected)

    @given(scores=score_dicts(), m=st.integers(1, 5), data=st.data())
    @settings(deadline=None, max_examples=60)
    def test_n_of_every_m_filters(self, scores, m, data):
        scores, n = finite(scores), data.draw(st.integers(0, m))
        masks = NMFilters(n, m).select(scores)
        for name, score in oracle.as_float64(scores).items():
            rows = score.reshape(len(score), -1).mean(1, keepdims=True) if score.ndim >= 2 else score
            kept = oracle.n_of_m(rows, n, m, "output", "dense")
            expected = np.broadcast_to(kept.reshape(-1, *[1] * (score.ndim - 1)) if score.ndim else kept, score.shape)
            assert np.array_equal(masks[name].numpy(), expected)

    @given(scores=score_dicts(), sparsity=SPARSITY)
    @settings(deadline=None, max_examples=40)
    def test_per_layer_gives_each_tensor_its_budget(self, scores, sparsity):
        masks = PerLayer(Unstructured()).select(scores, sparsity)
        for name, score in scores.items():
            expected = oracle.top(oracle.as_float64({name: score}), round((1 - sparsity) * score.numel()))
            assert oracle.same({name: masks[name]}, expected)

    @pytest.mark.parametrize("inner", [Unstructured(), Structured("filter")], ids=repr)
    def test_per_layer_draws_half_of_each_tensor(self, inner):
        like = {"a": torch.empty(8, 3), "b": torch.empty(4, 5)}
        masks = PerLayer(inner).draw(like, torch.Generator().manual_seed(0), 0.5)
        assert {name: int(mask.sum()) for name, mask in masks.items()} == {"a": 12, "b": 10}

    @pytest.mark.parametrize("axis", ["output", "input"])
    def test_convolution_groups(self, axis):
        """W[o, c, i, j]: groups run over o at fixed (c, i, j), or over (c, i, j) in order at fixed o."""
        weight = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(0))
        mask = NM(2, 4, axis=axis).select({"w": weight})["w"]
        if axis == "output":
            groups = [
                [(o + k, c, i, j) for k in range(4)]
                for o in (0, 4)
                for c in range(4)
                for i in range(3)
                for j in range(3)
            ]
        else:
            places = [(c, i, j) for c in range(4) for i in range(3) for j in range(3)]
            groups = [
                [(o, *place) for place in places[start : start + 4]] for o in range(8) for start in range(0, 36, 4)
            ]
        for group in groups:
            best = sorted(group, key=lambda index: -weight[index])[:2]
            assert [index for index in group if mask[index]] == sorted(best)

    def test_many_members_per_group(self):
        scores = {"w": torch.randint(0, 9, (200, 3), generator=torch.Generator().manual_seed(0)).float()}
        expected = {"w": oracle.n_of_m(scores["w"].double().numpy(), 37, 100, "output", "dense")}
        assert oracle.same(NM(37, 100).select(scores), expected)

    def test_never_choose_leaves_group_short(self):
        scores = {"w": torch.tensor([[1.0], [-math.inf], [-math.inf], [-math.inf]])}
        assert NM(2, 4).select(scores)["w"].view(-1).tolist() == [True, False, False, False]

    def test_channels_last_and_half_precision_scores(self):
        scores = torch.randint(0, 50, (8, 4, 3, 3), generator=torch.Generator().manual_seed(0)).float()
        for pattern in [
            Unstructured(),
            *map(Structured, UNITS),
            NM(2, 4),
            NM(2, 4, axis="input"),
            NMFilters(2, 4),
        ]:
            sparsity = None if pattern.implied_sparsity else 0.4
            plain = pattern.select({"w": scores}, sparsity)["w"]
            for dtype in (torch.float16, torch.bfloat16, torch.float64):
                other = scores.to(dtype).to(memory_format=torch.channels_last)
                mask = pattern.select({"w": other}, sparsity)["w"]
                assert mask.is_contiguous()
                assert torch.equal(mask, plain), pattern

    def test_million_units_of_many_sizes(self):
        generator = torch.Generator().manual_seed(0)
        scores = {f"p{i}": torch.rand(10_000, generator=generator) for i in range(100)}
        sizes = {f"p{i}": 1 + i * i for i in range(100)}
        total = sum(10_000 * width for width in sizes.values())
        taken = fill_greedily(scores, sizes, total // 2)
        used = sum(sizes[name] * int(mask.sum()) for name, mask in taken.items())
        assert total // 2 - 1 <= used <= total // 2

    def test_infinities_of_both_signs_exclude_unit(self):
        scores = {"w": torch.tensor([[math.inf, -math.inf], [1.0, 1.0]])}
        assert Structured("filter").select(scores, 0.0)["w"].tolist() == [[False, False], [True, True]]


class TestLimits:
    @pytest.mark.parametrize("pattern", FREE, ids=repr)
    def test_sparsity_zero_keeps_all_and_one_none(self, pattern):
        scores = {"w": torch.rand(5, 3, 2), "b": torch.rand(7), "s": torch.rand(())}
        assert all(bool(mask.all()) for mask in pattern.select(scores, 0.0).values())
        assert not any(bool(mask.any()) for mask in pattern.select(scores, 1.0).values())

    @pytest.mark.parametrize("make", [NM, NMFilters])
    def test_n_equal_m_is_dense_and_n_zero_is_empty(self, make):
        scores = {"w": torch.rand(8, 3, 2), "b": torch.rand(7), "s": torch.rand(())}
        assert all(bool(mask.all()) for mask in make(4, 4).select(scores).values())
        empty = make(0, 4, vectors="none").select(scores)
        assert not any(bool(mask.any()) for mask in empty.values())

    @pytest.mark.parametrize("pattern", FREE + FIXED, ids=repr)
    def test_ratio_zero_changes_nothing(self, pattern):
        generator = torch.Generator().manual_seed(0)
        like = {"w": torch.rand(8, 6, 3), "b": torch.rand(9)}
        sparsity = None if pattern.implied_sparsity else 0.5
        masks = pattern.select(like, sparsity)
        same = pattern.drop_and_grow(
            masks, {k: torch.rand(v.shape) for k, v in like.items()}, generator, sparsity=sparsity, ratio=0
        )
        assert all(torch.equal(same[name], masks[name]) for name in masks)

    @pytest.mark.parametrize("pattern", FREE + FIXED, ids=repr)
    def test_ratio_one_selects_by_growth(self, pattern):
        generator = torch.Generator().manual_seed(0)
        old, keep, grow = ({"w": torch.rand(8, 6, 3, generator=generator)} for _ in range(3))
        sparsity = None if pattern.implied_sparsity else 0.5
        masks = pattern.drop_and_grow(pattern.select(old, sparsity), keep, grow, sparsity=sparsity, ratio=1)
        assert torch.equal(masks["w"], pattern.select(grow, sparsity)["w"])

    @pytest.mark.parametrize("pattern", FREE + FIXED, ids=repr)
    def test_nothing_to_select_from(self, pattern):
        sparsity = None if pattern.implied_sparsity else 0.5
        empty = {"w": torch.zeros(0, 4), "v": torch.zeros(4, 0)}
        assert {name: mask.shape for name, mask in pattern.select(empty, sparsity).items()} == {
            name: score.shape for name, score in empty.items()
        }
        assert pattern.select({}, sparsity) == {}


class TestDropAndGrow:
    @given_growth
    @settings(deadline=None, max_examples=120)
    def test_unstructured_drops_lowest_and_grows_as_many(self, made, sparsity, ratio, random, seed):
        old, keep, grow = map(finite, made)
        pattern, budget = Unstructured(), round((1 - sparsity) * size(old))
        masks = pattern.select(old, sparsity)
        growth = torch.Generator().manual_seed(seed) if random else grow
        result = pattern.drop_and_grow(masks, keep, growth, sparsity=sparsity, ratio=ratio)
        kept = {name: mask.numpy() for name, mask in masks.items()}
        ranked = {name: np.where(kept[name], score, -np.inf) for name, score in oracle.as_float64(keep).items()}
        survivors = oracle.top(ranked, budget - round(ratio * budget))
        assert count_true(result) == budget
        assert all(bool((result[name].numpy() | ~survivors[name]).all()) for name in result)
        if not random:
            others = {name: np.where(survivors[name], np.inf, score) for name, score in oracle.as_float64(grow).items()}
            assert oracle.same(result, oracle.top(others, budget))

    @pytest.mark.parametrize("unit", UNITS)
    @given_growth
    @settings(deadline=None, max_examples=60)
    def test_structured_keeps_whole_units_within_budget(self, unit, made, sparsity, ratio, random, seed):
        old, keep, grow = map(finite, made)
        pattern, budget = Structured(unit), round((1 - sparsity) * size(old))
        masks = pattern.select(old, sparsity)
        kept = {name: mask.numpy() for name, mask in masks.items()}
        number = oracle.number(kept)
        survivors = oracle.greedy(oracle.as_float64(keep), unit, number - round(ratio * number), kept)
        assert number - oracle.number(survivors) >= round(ratio * number)
        growth = torch.Generator().manual_seed(seed) if random else grow
        result = pattern.drop_and_grow(masks, keep, growth, sparsity=sparsity, ratio=ratio)
        assert count_true(result) <= budget
        assert all(bool((result[name].numpy() | ~survivors[name]).all()) for name in result)
        if not random:
            free = {name: ~flags for name, flags in survivors.items()}
            left = budget - oracle.number(survivors)
            grown = oracle.greedy(oracle.as_float64(grow), unit, left, free)
            assert oracle.same(result, {name: grown[name] | survivors[name] for name in grown})

    @pytest.mark.parametrize("axis", ["output", "input"])
    @given(made=score_dicts(number=3), m=st.integers(1, 5), ratio=RATIO, random=st.booleans(), data=st.data())
    @settings(deadline=None, max_examples=60)
    def test_n_of_m_refills_groups(self, axis, made, m, ratio, random, data):
        old, keep, grow = map(finite, made)
        n = data.draw(st.integers(0, m))
        pattern = NM(n, m, axis=axis)
        masks = pattern.select(old)
        inside = {name: np.zeros(tuple(mask.shape), dtype=bool) for name, mask in masks.items()}
        for name, mask in masks.items():
            for members in oracle.groups(tuple(mask.shape), m, axis) if mask.ndim >= 2 else ():
                for index in members if len(members) == m else ():
                    inside[name][index] = True
        kept = {name: mask.numpy() & inside[name] for name, mask in masks.items()}
        number = oracle.number(kept)
        # Positions count along the matrix, which is the memory order of the weight.
        ranked = {name: np.where(kept[name], score, -np.inf) for name, score in oracle.as_float64(keep).items()}
        survivors = oracle.top(ranked, number - round(ratio * number))
        growth = torch.Generator().manual_seed(7) if random else grow
        result = pattern.drop_and_grow(masks, keep, growth, ratio=ratio)
        assert count_true(result) == count_true(masks)
        for name, mask in result.items():
            assert bool((mask.numpy() | ~survivors[name]).all())
            for members in oracle.groups(tuple(mask.shape), m, axis) if mask.ndim >= 2 else ():
                assert sum(bool(mask[index]) for index in members) == (n if len(members) == m else len(members))
        if not random:
            scores = oracle.as_float64(grow)
            expected = {name: oracle.n_of_m(scores[name], n, m, axis, "dense", survivors[name]) for name in masks}
            assert oracle.same(result, expected)

    def test_n_of_m_filters_moves_whole_filters(self):
        generator = torch.Generator().manual_seed(0)
        like = {"w": torch.rand(12, 3, 3, 3, generator=generator), "v": torch.rand(8, 5, generator=generator)}
        keep = {name: torch.rand(score.shape, generator=generator) for name, score in like.items()}
        pattern = NMFilters(2, 4)
        before = pattern.select(like)
        after = pattern.drop_and_grow(before, keep, generator, ratio=0.5)
        rows = {
            name: (b.flatten(1)[:, 0], a.flatten(1)[:, 0])
            for (name, b), a in zip(before.items(), after.values(), strict=True)
        }
        means = {name: keep[name].flatten(1).double().mean(1) for name in keep}
        lowest = sorted(float(means[name][i]) for name in rows for i in range(len(means[name])) if rows[name][0][i])[:5]
        for name, (old, new) in rows.items():
            assert bool((after[name].flatten(1) == new[:, None]).all())
            assert new.view(-1, 4).sum(1).tolist() == [2] * (len(new) // 4)
            for i in torch.nonzero(old & ~new).view(-1):
                assert float(means[name][i]) in lowest

    def test_random_growth_of_units_ignores_their_size(self):
        """A mean of many draws would hardly ever be the largest; one draw per unit gives each its chance."""
        generator = torch.Generator().manual_seed(0)
        masks = {"wide": torch.zeros(10, 50, dtype=torch.bool), "slim": torch.zeros(10, 50, dtype=torch.bool)}
        masks["wide"][0] = True
        keep = {name: torch.rand(mask.shape) for name, mask in masks.items()}
        seen = torch.zeros(20)
        for _ in range(400):
            result = Structured("filter").drop_and_grow(masks, keep, generator, sparsity=0.95, ratio=1)
            seen += torch.cat([result["wide"][:, 0], result["slim"][:, 0]]).float()
        assert float(seen.sum()) == 400
        assert float(seen.min()) > 4
        assert float(seen.max()) < 45

    def test_budget_never_drifts(self):
        generator = torch.Generator().manual_seed(0)
        like = {"w": torch.rand(31, 17, generator=generator), "b": torch.rand(13, generator=generator)}
        masks = Unstructured().select(like, 0.37)
        for step in range(50):
            keep = {name: torch.rand(score.shape, generator=generator) for name, score in like.items()}
            masks = Unstructured().drop_and_grow(masks, keep, generator, sparsity=0.37, ratio=step / 50)
            assert count_true(masks) == round(0.63 * 540)

    @pytest.mark.parametrize("sparsity", [0.2, 0.8])
    def test_budget_follows_changed_sparsity(self, sparsity):
        like = {"w": torch.rand(10, 10)}
        masks = Unstructured().drop_and_grow(
            Unstructured().select(like, 0.5), like, torch.Generator(), sparsity=sparsity, ratio=0.3
        )
        assert count_true(masks) == round((1 - sparsity) * 100)

    def test_same_seed_gives_same_mask(self):
        like = {"w": torch.rand(40, 30), "b": torch.rand(13)}
        for pattern in FREE + FIXED:
            sparsity = None if pattern.implied_sparsity else 0.5
            masks = pattern.select(like, sparsity)
            one, two = (
                pattern.drop_and_grow(masks, like, torch.Generator().manual_seed(5), sparsity=sparsity, ratio=0.4)
                for _ in "12"
            )
            assert all(torch.equal(one[name], two[name]) for name in masks)

    def test_inputs_are_unchanged(self):
        like = {"w": torch.rand(8, 8), "b": torch.rand(5)}
        for pattern in FREE + FIXED:
            sparsity = None if pattern.implied_sparsity else 0.5
            masks = pattern.select(like, sparsity)
            before = {name: mask.clone() for name, mask in masks.items()}
            pattern.drop_and_grow(masks, like, torch.Generator(), sparsity=sparsity, ratio=1)
            assert all(torch.equal(before[name], masks[name]) for name in masks)


class TestErrors:
    @pytest.mark.parametrize("sparsity", [-0.1, 1.2, math.nan])
    @pytest.mark.parametrize("pattern", FREE, ids=repr)
    def test_sparsity_out_of_range(self, pattern, sparsity):
        with pytest.raises(ValueError, match=r"sparsity must be in \[0, 1\]"):
            pattern.select({"w": torch.rand(4, 4)}, sparsity)

    def test_sparsity_missing_or_contradictory(self):
        with pytest.raises(ValueError, match="sparsity must be given"):
            Unstructured().select({"w": torch.rand(4, 4)})
        for pattern in (NM(2, 4), NMFilters(2, 4)):
            assert pattern.implied_sparsity == 0.5
            pattern.select({"w": torch.rand(4, 4)}, 0.5)
            with pytest.raises(ValueError, match="sparsity must be left out"):
                pattern.select({"w": torch.rand(4, 4)}, 0.9)

    @pytest.mark.parametrize("ratio", [-0.1, 1.1, math.nan])
    @pytest.mark.parametrize("pattern", FREE + FIXED, ids=repr)
    def test_ratio_out_of_range(self, pattern, ratio):
        masks = {"w": torch.ones(4, 4, dtype=torch.bool)}
        sparsity = None if pattern.implied_sparsity else 0.5
        with pytest.raises(ValueError, match=r"ratio must be in \[0, 1\]"):
            pattern.drop_and_grow(masks, {"w": torch.rand(4, 4)}, torch.Generator(), sparsity=sparsity, ratio=ratio)

    @pytest.mark.parametrize("make", [NM, NMFilters])
    def test_n_and_m(self, make):
        with pytest.raises(ValueError, match="m must be an integer of at least 1"):
            make(0, 0)
        for n in (-1, 5):
            with pytest.raises(ValueError, match="n must be"):
                make(n, 4)

    def test_unknown_choices(self):
        with pytest.raises(ValueError, match="unit must be one of"):
            Structured("layer")
        with pytest.raises(ValueError, match="rounding must be one of"):
            Structured("tensor", "above")
        with pytest.raises(ValueError, match="axis must be one of"):
            NM(2, 4, axis="rows")

    @pytest.mark.parametrize(("axis", "number"), [("output", 6), ("input", 45)])
    def test_remainder_raises(self, axis, number):
        with pytest.raises(ValueError, match=f"'conv' has {number} entries.*m=4.*remainder='dense'"):
            NM(2, 4, axis=axis, remainder="error").select({"conv": torch.rand(6, 5, 3, 3)})

    @pytest.mark.parametrize("pattern", FREE + FIXED, ids=repr)
    def test_nan_names_tensor(self, pattern):
        scores = {"a": torch.rand(4, 4), "b": torch.full((4, 4), math.nan)}
        with pytest.raises(ValueError, match=r"'b'.*NaN"):
            pattern.select(scores, None if pattern.implied_sparsity else 0.5)

    @pytest.mark.parametrize("pattern", FREE + FIXED, ids=repr)
    def test_drop_and_grow_needs_matching_names_shapes_and_bool_masks(self, pattern):
        masks, scores = {"w": torch.ones(4, 4, dtype=torch.bool)}, {"w": torch.rand(4, 4)}
        sparsity = None if pattern.implied_sparsity else 0.5
        with pytest.raises(ValueError, match="keep must have the same names"):
            pattern.drop_and_grow(masks, {"v": torch.rand(4, 4)}, scores, sparsity=sparsity, ratio=0.5)
        with pytest.raises(ValueError, match=r"grow.*shape"):
            pattern.drop_and_grow(masks, scores, {"w": torch.rand(4)}, sparsity=sparsity, ratio=0.5)
        with pytest.raises(ValueError, match="bool"):
            pattern.drop_and_grow({"w": torch.ones(4, 4)}, scores, scores, sparsity=sparsity, ratio=0.5)

    @pytest.mark.parametrize("pattern", [Structured("filter"), NMFilters(2, 4)], ids=repr)
    def test_drop_and_grow_needs_whole_units(self, pattern):
        masks = {"w": torch.eye(4, dtype=torch.bool)}
        with pytest.raises(ValueError, match=r"'w'.*part of a filter"):
            pattern.drop_and_grow(masks, {"w": torch.rand(4, 4)}, torch.Generator(), sparsity=0.5, ratio=0.5)


class TestNames:
    @pytest.mark.parametrize(
        ("name", "pattern"),
        [
            ("unstructured", Unstructured()),
            ("tensor", Structured("tensor")),
            ("filter", Structured("filter")),
            ("column", Structured("column")),
            ("tensor reach", Structured("tensor", "reach")),
            ("2:4", NM(2, 4)),
            ("1:8 input", NM(1, 8, axis="input")),
            ("2:4 filters", NMFilters(2, 4)),
        ],
    )
    def test_known(self, name, pattern):
        assert as_pattern(name) == pattern
        assert as_pattern(pattern) is pattern

    @pytest.mark.parametrize(
        ("name", "nearest"),
        [("filtre", "filter"), ("unstructurd", "unstructured"), ("2:4 inputs", "2:4 input")],
    )
    def test_unknown_suggests_nearest_first(self, name, nearest):
        with pytest.raises(ValueError, match=f"did you mean {nearest}"):
            as_pattern(name)

    @pytest.mark.parametrize("pattern", FREE + FIXED, ids=repr)
    def test_equal_hashable_picklable_and_readable(self, pattern):
        copy = pickle.loads(pickle.dumps(pattern))
        assert copy == pattern
        assert hash(copy) == hash(pattern)
        assert isinstance(copy, Pattern)
        assert eval(repr(pattern)) == pattern
