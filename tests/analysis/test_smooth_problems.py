import torch

from sparsesam.analysis import nonconvex_logistic


def test_known_constants_bound_the_problem_everywhere():
    problem = nonconvex_logistic(samples=50, size=5)
    model, generator = problem.make(), torch.Generator().manual_seed(0)
    for _ in range(20):
        w = 3 * torch.randn(5, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            model.w.copy_(w)
        (g,) = torch.autograd.grad(model(), [model.w], create_graph=True)
        rows = [torch.autograd.grad(entry, [model.w], retain_graph=True)[0] for entry in g]
        assert g.norm() <= problem.G
        assert torch.linalg.matrix_norm(torch.stack(rows), 2) <= problem.L
