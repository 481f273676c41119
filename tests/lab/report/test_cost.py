import json

import pytest

from sparsesam.lab.report.cost import cost_of, nominal_passes
from sparsesam.lab.report.read_run import read_run
from sparsesam.lab.report.variants import group_runs
from tests.lab.report.made_runs import write_run


def cost(*paths):
    (task,) = group_runs([read_run(path) for path in paths])
    found = cost_of(task)
    return found, {variant.label: found.values[variant] for variant in task.variants}


def test_times_of_runs_that_were_not_measured_together_are_not_compared(tmp_path):
    found, values = cost(
        write_run(tmp_path / "a", optimizer="sgd", seconds=2.0),
        write_run(tmp_path / "b", optimizer="sam", seconds=1.5),
    )
    assert values == {"SGD": 1.0, "SAM": 2.0}
    assert found.axis == "forward-backward passes per step"
    assert "it is not time" in found.explanation


def test_counted_passes_come_before_nominal_ones(tmp_path):
    path = write_run(tmp_path / "a", optimizer="ssam-f")
    content = json.loads((path / "result.json").read_text())
    content["result"]["forward_backwards_per_step"] = 1.6
    (path / "result.json").write_text(json.dumps(content))
    assert cost(path)[1] == {"SSAM-F": 1.6}


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({"optimizer": "sgd"}, 1),
        ({"optimizer": "sam"}, 2),
        ({"optimizer": "sam", "ascent": "momentum"}, 1),
        ({"optimizer": "sam", "ascent_fraction": 0.25}, 1.25),
        ({"optimizer": "sam", "ascent_every": 2}, 1.5),
        ({"optimizer": "sam", "ascent_start": 8, "epochs": 10}, 1.2),
    ],
)
def test_passes_by_the_settings(settings, passes):
    assert nominal_passes(settings) == pytest.approx(passes)
