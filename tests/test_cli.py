import pytest

from sparsesam.cli import main
from sparsesam.experiment import read_records


def test_demo_prints_a_table_and_leaves_records_with_provenance(tmp_path, capsys):
    assert main(["demo", "--epochs", "1", "--seeds", "1", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    records = read_records(tmp_path / "records.jsonl")
    assert [record["optimizer"] for record in records] == ["SGD", "SAM", "SSAM-F", "SSAM-D"]
    for record in records:
        assert record["optimizer"] in printed
        assert record["provenance"]["threads"] == 1
        assert record["config"]["epochs"] == 1


def test_a_bad_value_ends_with_its_reason(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["demo", "--epochs", "0"])
    assert exit_.value.code == 2
    assert "epochs must be at least 1, got 0" in capsys.readouterr().err
