import pytest
from benchmarks.report import write_run

from sparsesam.lab.cli import main
from sparsesam.lab.report import write_report


def test_command_writes_page_and_summarizes_it(tmp_path, capsys):
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b", seed=1, failure="it broke")
    page = tmp_path / "new" / "report.html"
    assert main(["report", str(tmp_path / "runs"), "-o", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}: 2 runs: 1 finished, 1 failed\n"
    assert page.read_text().startswith("<!doctype html>")


def test_page_is_not_written_over_directory(tmp_path):
    write_run(tmp_path / "a")
    with pytest.raises(ValueError, match="out must be a file"):
        write_report([tmp_path / "a"], tmp_path)


def test_name_that_is_not_text_is_harmless(tmp_path):
    write_run(tmp_path / b"caf\xe9".decode(errors="surrogateescape"))
    write_report([tmp_path], tmp_path / "report.html")
    assert "caf?" in (tmp_path / "report.html").read_text()


def test_figures_are_written_as_files(tmp_path):
    for optimizer in ("sgd", "sam"):
        write_run(tmp_path / "runs" / optimizer, optimizer=optimizer)
    write_report([tmp_path / "runs"], tmp_path / "report.html", figures=tmp_path / "figures")
    made = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"test-accuracy.svg", "test-accuracy.pdf", "accuracy-against-cost.pdf"} <= made
