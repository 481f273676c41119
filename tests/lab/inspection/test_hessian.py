from sparsesam.lab.inspection import load_run
from sparsesam.lab.inspection.hessian import HessianAnalysis
from tests.lab.experiment.runs import train


def test_hessian_reports_every_product(tmp_path):
    train(tmp_path, model="tests.lab.inspection.networks:linear")
    seen = []
    analysis = HessianAnalysis(count=2, trace_probes=12, density_probes=2, density_steps=5)
    found = analysis.measure(load_run(tmp_path, samples=40), lambda done, total: seen.append((done, total)))
    products = found.eigenvalues.products + found.trace.products + found.density.products
    assert [done for done, _ in seen] == list(range(products + 1))
    assert all(done <= total for done, total in seen)
    assert seen[-1] == (products, products)
