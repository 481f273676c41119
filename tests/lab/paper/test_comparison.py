import json

import pytest

from sparsesam.lab.paper.comparison import RecipeRuns
from sparsesam.lab.paper.recipe import recipe
from tests.lab.experiment.runs import result_with

SEEDS = {("sgd", seed): 0.8 + 0.01 * seed for seed in range(3)}
APART = {("sam", seed): 0.9 + 0.011 * seed for seed in range(3)}
ALIKE = {("ssam-random", seed): value for seed, value in enumerate((0.93, 0.88, 0.91))}


def compared(tmp_path, values, label="mask-strategy", measure="test_accuracy", **settings):
    """A recipe whose runs have finished with ``values`` by (optimizer, seed)."""
    chosen = recipe(label).at("laptop", settings)
    jobs = chosen.sweep(sorted({seed for _, seed in values})).jobs(tmp_path)
    for job in jobs:
        value = values.get((job.config.optimizer, job.config.seed))
        if value is not None:
            job.directory.mkdir()
            made = {"cpu": "a CPU", "threads": 1, "torch": "2.x"}
            content = {"result": result_with(**{measure: value}), "provenance": made}
            (job.directory / "result.json").write_text(json.dumps(content))
    return RecipeRuns(chosen, jobs)


def test_ours_with_interval_beside_papers(tmp_path):
    (drawn,) = compared(tmp_path, SEEDS | APART).table().renderables
    assert drawn.title.startswith("Table 9")
    assert list(drawn.columns[1].cells)[:3] == ["81.00 ± 2.48", "91.10 ± 2.73", "–"]
    assert list(drawn.columns[2].cells)[:3] == ["76.67", "77.25", "77.08"]
    assert drawn.caption == "6 of 21 runs"


def test_overrides_and_laptop_settings_are_listed(tmp_path):
    words = " ".join(compared(tmp_path, SEEDS, epochs=2).sentences())
    assert "Overridden by --set in every run: epochs=2." in words
    assert "30 % of the training labels are wrong" in words
    assert "compare rows, not values" in words
    assert "SGD's epochs, weight_decay were tuned on validation images, the others' were not" in words
    assert "On a CPU, 1 thread, torch 2.x. 3 seeds for each number" in words
    assert "Overridden" not in " ".join(compared(tmp_path / "other", {}).sentences())


def test_wide_table_is_drawn_in_parts_that_keep_ours_beside_papers():
    first, *_, last = RecipeRuns(recipe("corruption").at("full"), []).table().renderables
    assert [column.header for column in first.columns[1:3]] == ["ours:\nC10 0 %", "paper:\nC10 0 %"]
    assert [column.header for column in last.columns[-3:]] == ["ours:\nC100 40 %", "paper:\nC100 40 %", "our seeds"]
    assert (first.caption, last.title, last.caption) == (None, "", "0 of 0 runs")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (SEEDS | APART, "SAM is best, and differs significantly from every other row."),
        (
            SEEDS | APART | ALIKE,
            "SAM is best, but does not differ significantly from SSAM-F random mask with these seeds.",
        ),
        (
            SEEDS | APART | {("ssam-random", 0): 0.99},
            "SAM is best, and differs significantly from every other row. Not ranked, fewer than three seeds: SSAM-F "
            "random mask.",
        ),
        (
            {("sgd", 0): 0.8, ("sgd", 1): 0.8, ("sam", 0): 0.9, ("sam", 1): 0.9},
            "no ranking with fewer than three seeds; --seeds 3 or more may show a difference.",
        ),
    ],
    ids=["apart", "alike", "one with few seeds", "two seeds"],
)
def test_significant_differences_are_named(tmp_path, values, sentence):
    assert f"digits: {sentence}" in compared(tmp_path, values).sentences()


def test_times_state_how_they_were_measured(tmp_path):
    values = {("sam", 0): 3.0, ("ssam-f", 0): 1.5}
    comparison = compared(tmp_path, values, "nm_vit", "warm_seconds_per_step")
    assert "Times are measured in separate short runs" in " ".join(comparison.sentences())
    (drawn,) = comparison.table().renderables
    assert list(drawn.columns[2].cells) == ["×1.00", "×2.00", "×2.00"]
    assert list(drawn.columns[4].cells) == ["×1", "×1.2", "×1.2"]
