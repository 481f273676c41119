from sparsesam.lab.paper.comparison import RecipeRuns
from sparsesam.lab.paper.recipe import recipe
from tests.lab.paper.test_recipe import results_of

SEEDS = {("sgd", seed): 0.8 + 0.01 * seed for seed in range(3)}
APART = {("sam", seed): 0.9 + 0.011 * seed for seed in range(3)}
ALIKE = {("ssam-random", seed): value for seed, value in enumerate((0.93, 0.88, 0.91))}


def compared(tmp_path, values, label="mask-strategy", measure="test_accuracy", **settings):
    one, jobs = results_of(tmp_path, label, values, measure, settings)
    return RecipeRuns(one, jobs)


def test_ours_with_interval_beside_papers(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
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
    assert "On a CPU, 1 thread, torch 2.x. 3 seeds for each number" in words
    assert "Overridden" not in " ".join(compared(tmp_path / "other", {}).sentences())


def test_wide_table_is_drawn_in_parts_that_keep_ours_beside_papers(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    first, *_, last = RecipeRuns(recipe("corruption").at("full"), []).table().renderables
    assert [column.header for column in first.columns[1:3]] == ["ours:\nC10 0 %", "paper:\nC10 0 %"]
    assert [column.header for column in last.columns[-3:]] == ["ours:\nC100 40 %", "paper:\nC100 40 %", "our seeds"]
    assert (first.caption, last.title, last.caption) == (None, "", "0 of 0 runs")


def test_tuning_of_baseline_is_stated(tmp_path):
    words = " ".join(compared(tmp_path, SEEDS).sentences())
    assert "SGD's epochs, weight_decay were tuned on validation images, the others' were not" in words


def test_rows_that_seeds_cannot_distinguish_are_named(tmp_path):
    (sentence,) = [one for one in compared(tmp_path, SEEDS | APART | ALIKE).sentences() if one.startswith("digits")]
    assert sentence == (
        "digits: SAM is best, but does not differ significantly from SSAM-F random mask with these seeds."
    )


def test_rows_that_all_differ_are_reported(tmp_path):
    (sentence,) = [one for one in compared(tmp_path, SEEDS | APART).sentences() if one.startswith("digits")]
    assert sentence == "digits: SAM is best; it differs significantly from every other row."


def test_two_seeds_distinguish_nothing(tmp_path):
    values = {(name, seed): value for name, value in (("sgd", 0.8), ("sam", 0.9)) for seed in range(2)}
    sentences = list(compared(tmp_path, values).sentences())
    assert any("no ranking with fewer than three seeds" in sentence for sentence in sentences)
    assert any("fewer than three seeds have no interval" in sentence for sentence in sentences)


def test_row_with_fewer_than_three_seeds_is_not_ranked(tmp_path):
    values = SEEDS | APART | {("ssam-random", 0): 0.99}
    (sentence,) = [one for one in compared(tmp_path, values).sentences() if one.startswith("digits")]
    assert sentence == (
        "digits: SAM is best; it differs significantly from every other row. "
        "Not ranked, fewer than three seeds: SSAM-F random mask."
    )


def test_times_state_how_they_were_measured(tmp_path):
    values = {("sam", 0): 3.0, ("ssam-f", 0): 1.5}
    comparison = compared(tmp_path, values, "nm_vit", "warm_seconds_per_step")
    assert any(one.startswith("Times are measured in separate short runs") for one in comparison.sentences())
    (drawn,) = comparison.table().renderables
    assert list(drawn.columns[2].cells) == ["×1.00", "×2.00", "×2.00"]
    assert list(drawn.columns[4].cells) == ["×1", "×1.2", "×1.2"]


def test_open_questions_of_text_are_listed(tmp_path):
    assert any("The text names two units" in one for one in compared(tmp_path, {}, "cifar_structure").sentences())
