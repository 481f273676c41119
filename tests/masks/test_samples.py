"""Samples are drawn at random, once each, from every kind of data, with the given generator only."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from sparsesam.masks.samples import draw_batches

X, Y = torch.arange(20.0).view(10, 2), torch.arange(10)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(list(zip(X, Y, strict=True)))


def drawn(data, count=7, seed=0, chunk=3):
    generator = torch.Generator().manual_seed(seed)
    return list(draw_batches(data, count, generator=generator, chunk=chunk))


INDEXED = {
    "tensors": (X, Y),
    "list of tensors": [X, Y],
    "dataset": TensorDataset(X, Y),
    "list of samples": [(x, int(y)) for x, y in zip(X, Y, strict=True)],
    "loader": DataLoader(TensorDataset(X, Y), batch_size=4),
}
STREAMS = {
    "batches": [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])],
    "generator": None,
    "iterable loader": DataLoader(Stream(), batch_size=4),
}
STREAMS["loader of ready batches"] = DataLoader(STREAMS["batches"], batch_size=None)


def stream(name):
    return (batch for batch in STREAMS["batches"]) if name == "generator" else STREAMS[name]


@pytest.mark.parametrize("name", INDEXED)
def test_samples_are_drawn_without_replacement_in_chunks_with_the_generator_only(name):
    before = torch.random.get_rng_state()
    batches = drawn(INDEXED[name])
    assert [len(y) for _, y in batches] == [3, 3, 1]
    labels = torch.cat([y for _, y in batches])
    assert len(labels.unique()) == 7
    assert torch.equal(torch.cat([x for x, _ in batches]), X[labels])
    torch.testing.assert_close(drawn(INDEXED[name]), batches)
    assert not torch.equal(drawn(INDEXED[name], seed=4)[0][1], batches[0][1])
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", STREAMS)
def test_stream_is_read_from_start_and_last_batch_sliced(name):
    batches = drawn(stream(name), count=6)
    assert [len(y) for _, y in batches] == [4, 2]
    assert torch.equal(torch.cat([y for _, y in batches]), Y[:6])
    assert torch.equal(torch.cat([x for x, _ in batches]), X[:6])


@pytest.mark.parametrize("name", [*INDEXED, *STREAMS])
def test_too_few_samples_are_all_used_with_one_warning(name):
    data = INDEXED[name] if name in INDEXED else stream(name)
    with pytest.warns(UserWarning, match="12 samples were requested but data holds only 10") as caught:
        batches = drawn(data, count=12)
    assert len(caught) == 1
    assert torch.equal(torch.cat([y for _, y in batches]).sort().values, Y)


def test_collate_function_of_loader_is_used():
    loader = DataLoader(
        TensorDataset(X, Y), collate_fn=lambda samples: {"labels": torch.stack([y for _, y in samples])}
    )
    assert [len(batch["labels"]) for batch in drawn(loader)] == [3, 3, 1]


@pytest.mark.filterwarnings("ignore:.*samples:UserWarning")
@pytest.mark.parametrize(
    "options", [{"batch_size": 4, "sampler": SubsetRandomSampler(range(5))}, {"batch_sampler": [[0, 1], [2, 3, 4]]}]
)
def test_sampler_of_loader_is_used(options):
    labels = torch.cat([y for _, y in drawn(DataLoader(TensorDataset(X, Y), **options))])
    assert labels.sort().values.tolist() == [0, 1, 2, 3, 4]


def test_generator_of_sampler_stays_as_it_is():
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    drawn(DataLoader(TensorDataset(X, Y), batch_size=4, sampler=SubsetRandomSampler(range(7), generator=generator)))
    assert torch.equal(generator.get_state(), before)


def test_nested_batches_keep_their_structure():
    nested = ({"a": X, "b": (Y,)}, Y)
    for inputs, labels in [*drawn(nested), *drawn(iter([nested]))]:
        assert torch.equal(inputs["a"], X[labels])
        assert torch.equal(inputs["b"][0], labels)


@pytest.mark.parametrize(
    ("data", "count", "error", "words"),
    [
        *((data, 7, ValueError, "empty") for data in [(X[:0], Y[:0]), TensorDataset(X[:0]), [], iter([])]),
        (3, 7, TypeError, "got int"),
        ((X, Y[:5]), 7, ValueError, "equal first dimensions"),
        ((X, Y), 0, ValueError, "at least 1"),
    ],
)
def test_bad_data(data, count, error, words):
    with pytest.raises(error, match=words):
        drawn(data, count=count)
