from sparsesam.lab.inspection import load_run
from sparsesam.lab.inspection.hessian import HessianAnalysis
from tests.lab.experiment.runs import train


def test_hessian_reports_every_product(tmp_path):
    train(tmp_path, model="tests.lab.inspection.networks:linear")
    seen = []
    analysis = HessianAnalysis(count=2, trace_probes=12, density_probes=2, density_steps=5)
    found = analysis.measure(load_run(tmp_path, samples=40), lambda done, total: seen.append((done, total)))
    products = found.eigenvalues.products + found.trace.products + found.density.products
    assert seen == [(min(done, 28), 28) for done in range(1, products + 1)]  # 3 * 2 + 12 + 2 * 5
