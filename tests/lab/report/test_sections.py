import json

import pytest
from benchmarks.report import PROVENANCE, write_run
from rich.console import Console

from sparsesam.lab.display.figure import Figure
from sparsesam.lab.display.table import Table, cells, to_rich
from sparsesam.lab.report.write import build_report
from tests.lab.report.made_runs import analyses, write_analysis, write_every_analysis

#: Half the interval of three values with standard deviation 1: t(0.975, 2) times the standard error.
WIDTH = 4.302653 / 3**0.5


def sections(place):
    return {section.name: section for section in build_report([place])[1]}


def blocks(place, section="task-1"):
    return {block.name: block for part in sections(place)[section].parts for block in part.blocks}


def texts(table):
    return [[cell.text for cell in row] for row in table.rows]


def test_results_come_first(tmp_path):
    write_run(tmp_path / "a", optimizer="sgd")
    assert list(sections(tmp_path)) == ["task-1", "runs", "machines"]


def test_all_blocks_have_unique_names(tmp_path):
    write_every_analysis(write_run(tmp_path / "a"))
    write_every_analysis(write_run(tmp_path / "b", label_noise=0.2))
    everything = [block for section in sections(tmp_path).values() for part in section.parts for block in part.blocks]
    for kind in (Table, Figure):
        names = [block.name for block in everything if isinstance(block, kind)]
        assert len(set(names)) == len(names)


def test_accuracy_table_and_figure_have_mean_interval_cost_and_seeds(tmp_path):
    write_run(tmp_path / "a", optimizer="sgd", accuracy=0.8)
    for seed, accuracy in enumerate((0.90, 0.92, 0.91)):
        write_run(tmp_path / f"b{seed}", optimizer="ssam-f", sparsity=0.5, seed=seed, accuracy=accuracy)
    write_run(tmp_path / "c", optimizer="ssam-f", sparsity=0.5, seed=3, failure="it broke")
    table = blocks(tmp_path)["accuracy"]
    assert table.columns[:3] == ["variant", "test accuracy", "passes / SGD"]
    assert texts(table) == [
        ["SGD", "80.0 %", "1.00", "–", "1"],
        ["SSAM-F", "91.0 ± 2.5 %", "2.00", "0.5", "3 of 4, 1 failed"],
    ]
    sgd, ssam = blocks(tmp_path)["accuracy-against-cost"].panels[""]
    assert (sgd.x, ssam.x, sgd.bars) == ([1.0], [2.0], None)
    assert ssam.bars[0] == pytest.approx((91 - WIDTH, 91 + WIDTH))


@pytest.mark.parametrize("transposed", [False, True])
def test_brackets_in_names_are_no_markup_in_a_terminal(transposed, capsys):
    name = "[red]a[/b]"
    table = Table("", name, ["", name], [cells(name, name), cells("b", "c")])
    Console(width=200).print(to_rich(table, name, transposed=transposed))
    assert capsys.readouterr().out.count(name) == 5


def test_settings_that_differ_are_shown_with_values(tmp_path):
    write_run(tmp_path / "a", optimizer="sgd", weight_decay=0.01)
    write_run(tmp_path / "b", optimizer="sam", rho=0.3)
    table = blocks(tmp_path)["variants"]
    assert table.columns == ["variant", "optimizer", "weight_decay", "rho"]
    assert texts(table) == [["SGD", "sgd", "0.01", "–"], ["SAM", "sam", "0.0005", "0.3"]]


def test_failed_and_unfinished_runs_have_reason(tmp_path):
    write_run(tmp_path / "a", failure="DivergedError: nan")
    write_run(tmp_path / "b", seed=1, epochs=1, planned=3, finished=False)
    notes = sections(tmp_path)["runs"].parts[0].notes
    assert notes[0] == "failed a: DivergedError: nan"
    assert notes[1].startswith("unfinished b: epoch 1 of 3")


def test_curves_are_means_with_bands_and_unfinished_runs_are_dotted(tmp_path):
    for seed, accuracy in enumerate((0.6, 0.9, 0.75)):
        write_run(tmp_path / str(seed), optimizer="sam", seed=seed, accuracy=accuracy)
    write_run(tmp_path / "c", optimizer="sam", seed=3, epochs=2, planned=3, finished=False)
    mean, unfinished = blocks(tmp_path)["test-accuracy"].panels[""]
    assert (mean.name, mean.x, mean.faint) == ("SAM", [1, 2, 3], False)
    assert mean.y == pytest.approx([25, 50, 75])
    assert mean.bars[0] == pytest.approx((25 - 5 * WIDTH, 25 + 5 * WIDTH))
    assert (unfinished.name, unfinished.x, unfinished.faint) == ("SAM, seed 3 (unfinished)", [1, 2], True)


def test_sparsities_are_drawn_beside_plain_level(tmp_path):
    write_run(tmp_path / "a", optimizer="sgd", accuracy=0.7)
    for sparsity in (0.5, 0.9):
        write_run(tmp_path / str(sparsity), optimizer="ssam-d", sparsity=sparsity)
    plain, *masked = blocks(tmp_path)["accuracy-against-sparsity"].panels[""]
    assert (plain.faint, list(plain.y)) == (True, [70, 70])
    assert [point.x for point in masked] == [[0.5], [0.9]]


# ---- analyses ----------------------------------------------------------------------------------------------------

ANALYZED = {
    *("landscape-2d", "landscape-2d-surface", "landscape-2d-contours"),
    *("landscape-eigenvectors", "landscape-eigenvectors-surface", "landscape-eigenvectors-contours"),
    *("landscape-1d", "landscape-1d-line", "landscape-between"),
    *("landscape-between-line", "hessian", "hessian-density"),
    *("sharpness", "sharpness-path", "gradients", "gradient-difference", "gradient-difference-layers"),
    *("masks", "mask-density", "mask-overlap", "fisher", "fisher-scatter", "fisher-kept"),
    *("bound", "bound-terms", "convergence"),
}


def test_every_analysis_has_tables_and_figures(tmp_path):
    write_every_analysis(write_run(tmp_path / "a", optimizer="ssam-f", sparsity=0.5))
    assert blocks(tmp_path).keys() >= ANALYZED


def test_analysis_without_run_has_own_section(tmp_path):
    write_run(tmp_path / "a")
    write_analysis(tmp_path / "theory", "convergence", analyses()["convergence"])
    assert "convergence" in blocks(tmp_path, "other-analyses")
    assert build_report([tmp_path])[0].count() == "1 run: 1 finished"


@pytest.mark.parametrize("result", [{}, {"every": 3}, {"loss": [[1]], "x": [0, 1], "y": [0]}, {"density": "no"}])
def test_analyses_of_another_format_are_noted_and_skipped(tmp_path, result):
    run = write_run(tmp_path / "a")
    for name in ("landscape-2d", "gradients", "masks", "fisher", "bound", "sharpness", "hessian", "convergence"):
        write_analysis(run, name, result)
    assert not blocks(tmp_path).keys() & ANALYZED
    problems = [what for _, what in build_report([tmp_path])[0].problems]
    assert any("landscape-2d.json is not in the format of docs/analyze.md" in what for what in problems)


def landscape(factor):
    content = json.loads(json.dumps(analyses()["landscape-2d"]))
    content["loss"] = [[factor * loss for loss in row] for row in content["loss"]]
    return content


def test_landscapes_of_task_share_scale(tmp_path):
    for place, factor in enumerate((1.0, 3.0)):
        run = write_run(tmp_path / str(place), optimizer=("sgd", "sam")[place])
        write_analysis(run, "landscape-2d", landscape(factor))
    surface = blocks(tmp_path)["landscape-2d-surface"]
    heights = [z for panel in surface.panels.values() for row in panel[0].z for z in row]
    assert list(surface.panels) == ["SGD", "SAM"]
    assert surface.range_z == (min(heights), max(heights))


def test_losses_far_apart_are_drawn_as_logarithms(tmp_path):
    content = landscape(1.0)
    content["loss"][0][:2] = [1e6, None]
    write_analysis(write_run(tmp_path / "a"), "landscape-2d", content)
    surface = blocks(tmp_path)["landscape-2d-surface"]
    assert surface.z.title == "log10 of the loss"
    assert surface.panels["SSAM-F"][0].z[0][:2] == [6.0, None]


def test_machines_are_shown_once(tmp_path):
    for seed in range(2):
        write_run(tmp_path / str(seed), seed=seed)
    changed = write_run(tmp_path / "c", seed=2) / "result.json"
    content = json.loads(changed.read_text())
    changed.write_text(json.dumps({**content, "provenance": {**PROVENANCE, "commit": "abc+changes"}}))
    table = blocks(tmp_path, "machines")["machines"]
    assert [(row[0], *row[-2:]) for row in texts(table)] == [("a chip", "abc", "2"), ("a chip", "abc+changes", "1")]
