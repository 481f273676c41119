"""The short form of `make torture`."""

from tests.torture import crash, damage, fuzz


def test_damaged_files(tmp_path):
    assert damage.survive(tmp_path, 175).total() == 175


def test_crashes(tmp_path):
    assert crash.survive(tmp_path, kills=8).total() == 18


def test_malformed_inputs(tmp_path):
    assert fuzz.survive(tmp_path, 2000)["refused"] > 500
