import torch

from sparsesam.lab.data.mixup import mixup


def test_images_and_labels_are_mixed_by_the_same_share():
    images, labels = torch.eye(6).view(6, 6, 1, 1), torch.arange(6)
    mixed, targets = mixup(images, labels, alpha=1.0, num_classes=6, generator=torch.Generator().manual_seed(3))
    assert torch.equal(mixed.view(6, 6), targets)
    torch.testing.assert_close(targets.sum(1), torch.ones(6))
    assert ((targets > 0).sum(1) > 1).any()


def test_the_share_is_beta_distributed():
    """Beta(a, a) has mean 1/2 and variance 1 / (4 (2 a + 1))."""
    draws = torch.Generator().manual_seed(0)
    shares = []
    while len(shares) < 2000:
        _, targets = mixup(torch.zeros(2, 1, 1, 1), torch.tensor([0, 1]), alpha=0.5, num_classes=2, generator=draws)
        shares.append(float(targets[0, 0]))
    shares = torch.tensor([share for share in shares if share != 1.0])
    # Half of the permutations of two leave each image with itself; the others show the share.
    assert abs(shares.mean() - 0.5) < 0.05
    assert abs(shares.var() - 1 / 8) < 0.02
