import pytest

from sparsesam.lab.experiment import append_records, read_records


def test_records_come_back_in_the_order_written(tmp_path):
    path = tmp_path / "deep" / "records.jsonl"
    append_records(path, [{"a": 1}, {"a": None}])
    append_records(path, [{"b": [0.5]}])
    assert read_records(path) == [{"a": 1}, {"a": None}, {"b": [0.5]}]


def test_a_record_that_is_not_json_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "records.jsonl"
    append_records(path, [{"a": 1}])
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_records(path, [{"a": 2}, {"a": float("nan")}])
    assert read_records(path) == [{"a": 1}]
