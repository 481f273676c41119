import json
from dataclasses import replace

import pytest

from sparsesam.lab.experiment.calibration import calibrate, read_calibration
from sparsesam.lab.experiment.config import RunEnvironment
from sparsesam.lab.experiment.run_directory import unseal
from sparsesam.lab.experiment.sweep import Job
from tests.lab.experiment.runs import SHORT

PLACE = RunEnvironment(threads=1)


def jobs(tmp_path, **variants):
    return [
        Job(label, replace(SHORT, **settings, seed=seed), tmp_path / f"{label}{seed}")
        for label, settings in variants.items()
        for seed in (0, 1)
    ]


def test_every_variant_is_measured_once_per_round(tmp_path):
    made = jobs(tmp_path, SGD={}, SAM={"optimizer": "sam"}, F={"optimizer": "ssam-f", "mask_epochs": 1})
    found = calibrate(made, PLACE, tmp_path / "runs")
    assert [time.label for time in found.variants.values()] == ["SGD", "SAM", "F"]
    assert all(len(time.seconds_per_step) == 5 and min(time.seconds_per_step) > 0 for time in found.variants.values())
    sgd, sam, fisher = found.variants.values()
    assert found.seconds_per_epoch(made[1].config) == found.seconds_per_epoch(made[0].config) == sgd.seconds_per_epoch
    assert fisher.seconds_per_mask > 0
    assert sgd.seconds_per_mask is None
    assert 1.2 < sam.seconds_per_epoch / sgd.seconds_per_epoch < 4


def test_saved_calibration_is_reused_for_same_variants_only(tmp_path):
    made = jobs(tmp_path, SGD={})
    found = calibrate(made, PLACE, tmp_path)
    again = read_calibration(tmp_path)
    assert again.variants == found.variants
    assert again.fits([job.config for job in made])
    assert not again.fits([replace(SHORT, lr=0.3)])
    content = unseal(json.loads((tmp_path / "calibration.json").read_text()))
    assert content["kind"] == "calibration"
    assert list(content["variants"]) == [made[1].config.variant.content_hash] == [replace(SHORT, seed=0).content_hash]
    content["provenance"]["cpu"] = "another"
    (tmp_path / "calibration.json").write_text(json.dumps(content))
    assert not read_calibration(tmp_path).fits([SHORT])
    assert read_calibration(tmp_path / "elsewhere") is None


def test_epochs_before_first_ascent_cost_as_much_as_plain_ones(tmp_path):
    made = jobs(tmp_path, SGD={}, late={"optimizer": "sam", "ascent_start": 3.0})
    late = calibrate(made, PLACE, tmp_path).variants[made[2].config.variant.content_hash]
    assert late.seconds_per_epoch < 0.9 * 5 * max(late.seconds_per_step)


def test_invalid_settings_name_variant_and_leave_no_files(tmp_path):
    made = jobs(tmp_path, SGD={}, bad={"optimizer": "ssam-f", "pattern": "2:4", "sparsity": 0.9})
    with pytest.raises(ValueError, match=r"^bad: sparsity must be left out"):
        calibrate(made, PLACE, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_diverging_variant_is_left_to_its_run(tmp_path):
    made = jobs(tmp_path, SGD={}, bad={"lr": 1e30})
    assert [time.label for time in calibrate(made, PLACE, tmp_path).variants.values()] == ["SGD"]
