import json

import pytest

from sparsesam.lab.experiment.paper import recipe
from sparsesam.lab.report.figure import Figure
from sparsesam.lab.report.section import Table
from sparsesam.lab.report.write import build
from tests.lab.report.made_runs import PROVENANCE, write_analysis, write_every_analysis, write_run


def sections(*places):
    material, built = build(places)
    return material, {section.name: section for section in built}


def texts(table):
    return [[cell.text for cell in row] for row in table.rows]


def test_the_accuracy_table_has_mean_spread_time_and_seeds(tmp_path):
    write_run(tmp_path / "a", optimizer="sgd", accuracy=0.8, seconds=1.0)
    for seed, accuracy in enumerate((0.90, 0.92)):
        write_run(tmp_path / f"b{seed}", optimizer="ssam-f", sparsity=0.5, seed=seed, accuracy=accuracy, seconds=2.0)
    write_run(tmp_path / "c", optimizer="ssam-f", sparsity=0.5, seed=2, failure="it broke")
    _, found = sections(tmp_path)
    (table,) = found["results"].blocks
    assert table.columns == [
        "variant",
        "test accuracy",
        "best",
        "train accuracy",
        "time / SGD",
        "sparsity",
        "seeds",
    ]
    assert texts(table) == [
        ["SGD", "80.00 %", "80.00 %", "80.00 %", "1.00", "–", "1"],
        ["SSAM-F", "91.00 ± 1.41 %", "91.00 %", "91.00 %", "2.00", "0.5000", "2 of 3, 1 failed"],
    ]


def test_runs_that_failed_or_are_unfinished_are_listed_with_their_reason(tmp_path):
    write_run(tmp_path / "a", failure="DivergedError: nan")
    write_run(tmp_path / "b", seed=1, epochs=1, planned=3, finished=False)
    _, found = sections(tmp_path)
    rows = texts(found["runs"].blocks[0])
    assert [row[3] for row in rows] == ["failed", "unfinished"]
    assert rows[0][-1] == "DivergedError: nan"
    assert "stopped after epoch 1 of 3" in rows[1][-1]


def test_curves_are_means_with_bands_and_unfinished_runs_are_dotted(tmp_path):
    for seed, accuracy in enumerate((0.6, 0.9)):
        write_run(tmp_path / str(seed), optimizer="sam", seed=seed, accuracy=accuracy)
    write_run(tmp_path / "c", optimizer="sam", seed=2, epochs=1, planned=3, finished=False)
    _, found = sections(tmp_path)
    mean, open_ = found["curves"].blocks[0].panels["digits, small-cnn"]
    assert (mean.name, mean.x, mean.faint) == ("SAM", [1, 2, 3], False)
    assert mean.y == pytest.approx([25, 50, 75])
    assert mean.error[2] == pytest.approx(30 / 2**0.5)
    assert (open_.name, open_.x, open_.faint) == ("SAM, seed 2 (unfinished)", [1], True)


def test_sparsities_are_drawn_beside_the_plain_level(tmp_path):
    write_run(tmp_path / "a", optimizer="sgd", accuracy=0.7)
    for sparsity in (0.5, 0.9):
        write_run(tmp_path / str(sparsity), optimizer="ssam-d", sparsity=sparsity)
    _, found = sections(tmp_path)
    plain, *masked = found["sparsity"].blocks[0].panels["digits, small-cnn"]
    assert (plain.faint, list(plain.y)) == (True, [70, 70])
    assert [one.x for one in masked] == [[0.5], [0.9]]


def test_without_plain_runs_cost_is_in_seconds(tmp_path):
    write_run(tmp_path / "a", optimizer="sam", seconds=3.0)
    _, found = sections(tmp_path)
    figure = found["cost"].blocks[0]
    assert (figure.x.title, figure.panels["digits, small-cnn"][0].x) == ("seconds per epoch", [3.0])


# ---- the paper's tables ------------------------------------------------------------------------------------------


def write_recipe(out, label, scale, leave_out=(), **overrides):
    for number, job in enumerate(recipe(label).sweep(scale, [0, 1], overrides).jobs(out)):
        if job.label not in leave_out:
            settings = {**vars(job.config)}
            epochs = settings.pop("epochs")
            write_run(job.directory, epochs=1, planned=epochs, accuracy=0.5 + number / 100, **settings)


def test_the_paper_s_numbers_stand_beside_ours_in_its_directory_whatever_was_set(tmp_path):
    write_recipe(tmp_path / "paper" / "mask-strategy" / "laptop", "mask-strategy", "laptop", epochs=2)
    _, found = sections(tmp_path)
    (table,) = found["paper"].blocks
    sgd, sam, *_ = texts(table)
    assert sgd == ["SGD", "53.50 ± 4.95", "76.67", "2"]
    assert sam[0], sam[2] == ("SAM", "77.25")
    assert "Ours were run with epochs 2 instead of the recipe’s." in table.caption


def test_a_table_run_elsewhere_is_known_by_all_its_cells(tmp_path):
    write_recipe(tmp_path / "all", "mask-strategy", "laptop")
    write_recipe(tmp_path / "most", "mask-strategy", "laptop", leave_out=("SAM, digits",))
    assert [table.name for table in sections(tmp_path / "all")[1]["paper"].blocks] == ["paper-mask-strategy-laptop"]
    assert sections(tmp_path / "most")[1]["paper"].blocks == []


def test_a_table_that_has_hardly_begun_is_shown_in_its_directory(tmp_path):
    out = tmp_path / "mask-strategy" / "laptop"
    job = recipe("mask-strategy").sweep("laptop", [0], {}).jobs(out)[0]
    settings = {name: one for name, one in vars(job.config).items() if name != "epochs"}
    write_run(job.directory, epochs=1, planned=30, finished=False, **settings)
    (table,) = sections(tmp_path)[1]["paper"].blocks
    assert texts(table)[0] == ["SGD", "–", "76.67", "0"]


# ---- analyses ----------------------------------------------------------------------------------------------------

ANALYSED = {
    "landscapes": {
        "landscape-2d-surface",
        "landscape-2d-contours",
        "landscape-2d-cut",
        "landscape-eigenvectors-surface",
        "landscape-eigenvectors-contours",
        "landscape-eigenvectors-cut",
        "landscape-1d",
        "landscape-between",
    },
    "hessian": {"hessian", "hessian-eigenvalues", "hessian-density"},
    "sharpness": {"sharpness", "sharpness-path"},
    "gradients": {"gradients", "gradient-difference", "gradient-difference-layers"},
    "masks": {"masks", "mask-density", "mask-overlap"},
    "fisher": {"fisher", "fisher-scatter", "fisher-kept"},
    "bound": {"bound", "bound-terms"},
    "convergence": {"assumptions", "convergence"},
}


def test_every_analysis_has_its_tables_and_figures(tmp_path):
    write_every_analysis(write_run(tmp_path / "a", optimizer="ssam-f", sparsity=0.5))
    material, found = sections(tmp_path)
    assert material.problems == []
    assert {name: {block.name for block in found[name].blocks} for name in ANALYSED} == ANALYSED


@pytest.mark.parametrize("result", [{}, {"every": 3}, {"loss": [[1]], "x": [0, 1], "y": [0]}, {"density": "no"}])
def test_analyses_of_another_shape_are_noted_and_left_out(tmp_path, result):
    run = write_run(tmp_path / "a")
    for name in ("landscape-2d", "gradients", "masks", "fisher", "bound", "sharpness", "hessian", "convergence"):
        write_analysis(run, name, result)
    material, found = sections(tmp_path)
    assert found["gradients"].blocks == found["masks"].blocks == found["landscapes"].blocks == []
    assert any("landscape-2d.json is not as docs/analyses.md says" in what for _, what in material.problems)


def test_losses_far_apart_are_drawn_as_logarithms(tmp_path):
    run = write_run(tmp_path / "a")
    write_analysis(run, "landscape-2d", {"x": [-1, 1], "y": [-1, 1], "loss": [[0.1, 0.1], [1e6, None]]})
    surface = sections(tmp_path)[1]["landscapes"].blocks[0]
    assert surface.z.title == "log10 of the loss"
    assert surface.panels["SSAM-F"][0].z == [[-1.0, -1.0], [6.0, None]]


def test_sections_without_data_say_what_makes_them(tmp_path):
    write_run(tmp_path / "a")
    found = sections(tmp_path)[1]
    assert found["hessian"].blocks == []
    assert found["hessian"].hint == "sparsesam analyze hessian RUN…"


def test_provenance_is_told_once_per_machine(tmp_path):
    write_run(tmp_path / "a")
    other = write_run(tmp_path / "b", seed=1)
    content = json.loads((other / "result.json").read_text())
    (other / "result.json").write_text(json.dumps({**content, "provenance": {**PROVENANCE, "cpu": "another chip"}}))
    origins, settings = sections(tmp_path)[1]["provenance"].blocks
    assert [row[0] for row in texts(origins)] == ["a chip", "another chip"]
    assert ["dataset", "digits"] in texts(settings)


def test_all_blocks_are_named_apart(tmp_path):
    write_every_analysis(write_run(tmp_path / "a"))
    blocks = [block for section in sections(tmp_path)[1].values() for block in section.blocks]
    for kind in (Table, Figure):
        names = [block.name for block in blocks if isinstance(block, kind)]
        assert len(set(names)) == len(names)
