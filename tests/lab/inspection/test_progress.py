from unittest.mock import MagicMock

from sparsesam.lab.inspection import load_run
from sparsesam.lab.inspection import progress as module
from sparsesam.lab.inspection.hessian import HessianAnalysis
from sparsesam.lab.inspection.progress import show_progress
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


def test_log_has_lines_with_remaining_time_at_rate_since_first_call(monkeypatch, capsys):
    seconds = iter([5.0, 9.0, 16.0, 17.0, 30.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(module, "Progress", MagicMock())  # the bar of a terminal reads the time too
    with show_progress("hessian of a") as progress:
        for done in (10, 20, 35, 40, 100):
            progress(done, 100)
    assert capsys.readouterr().err == "hessian of a: 35 %, about 29 s remaining\n"
