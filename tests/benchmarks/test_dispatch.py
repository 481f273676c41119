import torch
from benchmarks.dispatch import LiveBytes


def test_counts_live_bytes_and_peak():
    with LiveBytes([]) as live:
        first = torch.zeros(100)
        second = first + 1
        assert live.now == 800
        del first
        assert live.now == 400
    assert live.peak == 800
    del second


def test_views_are_free():
    with LiveBytes([]) as live:
        tensor = torch.zeros(10, 10)
        views = [tensor.t(), tensor[0], tensor.view(-1)]
        assert live.now == 400
        del tensor
        assert live.now == 400
        del views
        assert live.now == 0


def test_known_tensors_and_in_place_ops_are_free():
    known = torch.zeros(10)
    with LiveBytes([known]) as live:
        known.add_(1).mul_(2)
    assert live.peak == 0


def test_counts_tensors_held_by_graph():
    weight = torch.zeros(10, requires_grad=True)
    with LiveBytes([weight]) as live:
        loss = weight.exp().sum()
        assert live.now == 44
        loss.backward()
        assert live.now == 44  # the graph's tensor was freed, the gradient allocated
