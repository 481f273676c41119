"""The page as a reader sees it, in headless Chromium."""

import csv
import io
import os
import shutil
from contextlib import contextmanager

import pytest
from benchmarks.report import write_run, write_runs
from PIL import Image

from sparsesam.lab.report import write_report
from sparsesam.lab.report.write import build_report
from tests.lab.report.made_runs import write_every_analysis

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None and not os.environ.get("CI"):
    pytest.skip("no Chromium here; install the package chromium to test the page", allow_module_level=True)

OPTIONS = [
    "--no-sandbox",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-gpu",
    "--enable-unsafe-swiftshader",  # surfaces need WebGL, and there is no GPU
]
EVIL = "<script>window.harmed = true</script><img src=x onerror='window.harmed = true'>"


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None, "the checks need Chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs with content for every section, and a model whose name contains HTML."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(3):
        write_run(folder / f"sgd{seed}", optimizer="sgd", seed=seed, accuracy=0.80 + seed / 50, model=EVIL)
        sam = write_run(folder / f"sam{seed}", optimizer="sam", seed=seed, accuracy=0.9, seconds=4.0, model=EVIL)
        ssam = {"optimizer": "ssam-f", "sparsity": 0.5, "accuracy": 0.95, "seconds": 4.4, "model": EVIL}
        write_run(folder / f"ssam{seed}", seed=seed, **ssam)
    write_every_analysis(sam)
    write_every_analysis(folder / "ssam0")
    for second_surface in folder.glob("*/analyses/landscape-eigenvectors.json"):
        second_surface.unlink()
    write_run(folder / "failed", optimizer="sam", seed=3, model=EVIL, failure=f"it broke: {EVIL}")
    write_run(folder / "open", optimizer="sgd", seed=3, model=EVIL, epochs=1, planned=3, finished=False)
    return folder


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report([runs], path, title=EVIL)
    return path


@contextmanager
def reading(browser):
    """Yields a function that opens pages; none of them may have errors or network requests."""
    contexts, events, requested = [], [], []

    def opened(path, **options):
        usual = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"}
        contexts.append(browser.new_context(**{**usual, **options}))
        page = contexts[-1].new_page()
        page.set_default_timeout(90_000)  # without a GPU and under load, a surface takes long to draw
        page.on("console", lambda message: events.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: events.append(str(error)))
        page.on("request", lambda request: requested.append(request.url))
        page.goto(path.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert events == []
    assert all(url.startswith(("file:", "blob:", "data:")) for url in requested)


@pytest.fixture(scope="module")
def drawn(browser, report):
    """The page with every figure drawn. Opening it takes seconds, so tests share it, each with figures of its own."""
    with reading(browser) as opened:
        yield draw_all(opened(report, accept_downloads=True))


@pytest.fixture
def opened(browser):
    with reading(browser) as opened:
        yield opened


def drawn_one(figure):
    """Scroll to a figure, as a reader does, and wait until it is there."""
    figure.scroll_into_view_if_needed()
    figure.locator(".main-svg").first.wait_for(state="attached")
    return figure


def draw_all(page):
    for figure in page.locator("figure").all():
        drawn_one(figure)
    return page


def saved(page, button):
    with page.expect_download() as download:
        button.click()
    return download.value.suggested_filename, download.value.path().read_text()


MARKS = {
    "lines": ".scatterlayer path.js-line",
    "points": ".scatterlayer path.point",
    "bars": ".barlayer path",
    "heatmap": ".heatmaplayer image",
    "contour": ".contourlayer path",
    "surface": ".gl-container canvas",
}


def test_every_figure_is_drawn(drawn, runs):
    figures = [figure for section in build_report([runs])[1] for figure in section.figures]
    assert len(figures) > 15
    for figure in figures:
        marks = drawn.locator(f"#figure-{figure.name}").locator(MARKS[figure.kind])
        assert marks.count() > 0, figure.name
    # A canvas could be empty: the surface has many colors.
    shot = Image.open(io.BytesIO(drawn.locator("#figure-landscape-2d-surface .plot").screenshot()))
    assert len(shot.convert("RGB").resize((200, 200)).getcolors(40_000)) > 200


def test_names_of_runs_are_escaped(drawn):
    assert drawn.evaluate("window.harmed") is None
    assert drawn.locator("h1").inner_text() == EVIL
    assert drawn.locator("img").count() == 0


def test_tables_sort_by_headings_also_with_keyboard_and_runs_show_settings(drawn):
    heading = drawn.locator("#table-accuracy th", has=drawn.get_by_role("button", name="test accuracy", exact=True))
    names = drawn.locator("#table-accuracy tbody th")
    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert names.all_inner_texts() == ["SGD", "SAM", "SSAM-F"]
    heading.get_by_role("button").focus()
    drawn.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    assert names.all_inner_texts() == ["SSAM-F", "SAM", "SGD"]
    sparsity = drawn.locator("#table-accuracy").get_by_role("button", name="sparsity")
    for _ in range(2):  # rows without a number stay last
        sparsity.click()
        assert names.all_inner_texts()[-1] == "SGD"
    run = drawn.locator("#table-runs details").first
    assert not run.locator("pre").is_visible()
    run.locator("summary").click()
    assert "weight_decay: 0.0005" in run.locator("pre").inner_text()


def test_theme_follows_system_and_button(opened, report):
    page = opened(report, color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    line = "getComputedStyle(document.querySelector('#figure-accuracy-against-cost .xtick text')).fill"
    page.locator("#figure-accuracy-against-cost .xtick").first.wait_for(state="attached")
    dark = page.evaluate(background), page.evaluate(line)
    page.get_by_role("button", name="Light colors").press("Enter")
    assert page.get_by_role("button", name="Dark colors").count() == 1
    page.wait_for_function(f"{line} !== {dark[1]!r}")
    light = page.evaluate(background), page.evaluate(line)
    assert dark[0] != light[0]


PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
DESKTOP = {"viewport": {"width": 1400, "height": 900}}


@pytest.fixture(scope="module", params=[PHONE, DESKTOP], ids=["phone", "desktop"])
def looked_at(request, browser, report):
    with reading(browser) as opened:
        yield draw_all(opened(report, **request.param))


def boxes(page, selector):
    """Left, top, right, bottom of every element with a size, by figure."""
    script = """selector => [...document.querySelectorAll("figure")].map(figure => [figure.dataset.figure,
        [...figure.querySelectorAll(selector)].map(e => e.getBoundingClientRect())
            .filter(r => r.width > 0 && r.height > 0).map(r => [r.left, r.top, r.right, r.bottom])])"""
    return dict(page.evaluate(script, selector))


def overlap(first, second):
    return first[0] < second[2] and second[0] < first[2] and first[1] < second[3] and second[1] < first[3]


def assert_apart(found):
    for figure, present in found.items():
        for place, box in enumerate(present):
            assert not any(overlap(box, other) for other in present[:place]), figure


def test_nothing_overlaps_and_nothing_is_cut(looked_at):
    assert looked_at.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert_apart(boxes(looked_at, ".bar h4, .plot, .legend, figcaption"))
    for ticks in (".xtick text", ".ytick text"):
        straight = {  # names at an angle have boxes that are too large
            figure: [(left + 1, top + 2, right - 1, bottom - 2) for left, top, right, bottom in found]
            for figure, found in boxes(looked_at, ticks).items()
            if "layers" not in figure and "terms" not in figure
        }
        assert_apart(straight)
    texts, frames = boxes(looked_at, ".plot svg text"), boxes(looked_at, ".plot")
    assert sum(map(len, texts.values())) > 100
    for figure, found in texts.items():
        ((left, top, right, bottom),) = frames[figure]
        for box in found:
            assert left - 1 <= box[0] <= box[2] <= right + 1, figure
            assert top - 1 <= box[1] <= box[3] <= bottom + 1, figure


def test_chosen_point_has_ring_and_name_in_legend(looked_at):
    figure = looked_at.locator("#figure-accuracy-against-cost")
    assert figure.locator(".legend button").all_text_contents() == ["●SGD", "▲SAM", "✖SSAM-F (best choice)"]
    assert figure.locator(".scatterlayer path.point").count() == 4  # three variants and the ring
    epochs = looked_at.locator("#figure-test-accuracy .xtick text").all_text_contents()
    assert epochs == ["1", "2", "3"]


def test_first_screen_has_accuracy_and_chart_whose_points_do_not_hide_each_other(opened, tmp_path):
    for optimizer in ("sgd", "sam", "asam", "gsam", "wsam"):
        for seed in range(3):
            write_run(tmp_path / f"{optimizer}{seed}", optimizer=optimizer, seed=seed, accuracy=0.95, label_noise=0.3)
    write_report([tmp_path], tmp_path / "report.html")
    for options in (PHONE, DESKTOP):
        page = opened(tmp_path / "report.html", **options)
        page.locator("figure .main-svg").first.wait_for(state="attached")
        assert "95.0 ± 0.0 %" in page.locator(".lead").inner_text()
        plot = page.locator("figure .plot").first.bounding_box()
        assert plot["y"] + plot["height"] < page.viewport_size["height"]
        found = boxes(page, ".scatterlayer path.point")["accuracy-against-cost"]
        *points, _ = sorted(found, key=lambda box: box[2] - box[0])  # without the ring, the largest
        assert len(points) == 5
        assert_apart({"points": points})


def test_bands_appear_when_three_curves_are_left(opened, tmp_path):
    for seed in range(3):
        for optimizer in ("sgd", "sam", "asam", "gsam"):
            write_run(tmp_path / f"{optimizer}{seed}", optimizer=optimizer, seed=seed, accuracy=0.8 + seed / 50)
    write_report([tmp_path], tmp_path / "report.html")
    figure = drawn_one(opened(tmp_path / "report.html").locator("#figure-test-accuracy"))
    bands = figure.locator(".scatterlayer .js-fill")
    assert bands.count() == 0
    assert "when at most 3 curves are shown" in figure.locator("figcaption").inner_text()
    figure.get_by_role("button", name="GSAM").click()
    bands.first.wait_for(state="attached")
    assert bands.count() == 3


def test_svg_and_csv_are_saved(drawn):
    figure = drawn.locator("#figure-accuracy-against-cost")
    name, svg = saved(drawn, figure.get_by_role("button", name="SVG"))
    assert name == "accuracy-against-cost.svg"
    assert svg.startswith("<svg")
    assert "SSAM-F" in svg
    name, text = saved(drawn, figure.get_by_role("button", name="CSV"))
    assert name == "accuracy-against-cost.csv"
    rows = list(csv.reader(io.StringIO(text)))
    assert rows[0] == ["series", "forward-backward passes / SGD’s", "test accuracy (%)", "low", "high"]
    assert [row[:3] for row in rows[1:]] == [["SGD", "1", "82"], ["SAM", "2", "90"], ["SSAM-F", "2", "95"]]
    assert [float(end) for end in rows[1][3:]] == pytest.approx([77.0317, 86.9683])


def test_surface_is_saved_and_rotated_with_keyboard(drawn):
    figure = drawn.locator("#figure-landscape-2d-surface")
    eye = "document.querySelector('#figure-landscape-2d-surface .plot').layout.scene.camera.eye.x"
    before = drawn.evaluate(eye)
    figure.locator(".plot").press("ArrowRight")
    assert drawn.evaluate(eye) != before
    _, svg = saved(drawn, figure.get_by_role("button", name="SVG"))
    assert "<image" in svg
    _, text = saved(drawn, figure.get_by_role("button", name="CSV"))
    assert len(text.splitlines()) == 1 + 2 * 81


def test_series_can_be_hidden_and_panels_chosen(drawn):
    curves = drawn.locator("#figure-test-accuracy")
    button = curves.get_by_role("button", name="SAM", exact=True)
    lines = curves.locator("path.js-line")
    before = lines.count()
    button.press("Enter")
    assert button.get_attribute("aria-pressed") == "false"
    assert lines.count() < before
    assert drawn.evaluate("document.activeElement.textContent") == "SAM"
    masks = drawn.locator("#figure-mask-density")
    masks.locator("select").select_option(index=1)
    assert drawn.evaluate("document.querySelector('#figure-mask-density .plot').data[0].name") == "SSAM-F"


def test_first_tab_skips_navigation(opened, report):
    page = opened(report)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.getElementById('main').contains(document.activeElement)")


def test_print_shows_everything_in_light_theme(opened, runs, tmp_path):
    write_report([runs / "sgd0", runs / "sam0"], tmp_path / "report.html")
    page = opened(tmp_path / "report.html", color_scheme="dark", viewport={"width": 1280, "height": 300})
    assert page.locator("figure:not(:has(.main-svg))").count() > 0
    page.pdf(path=tmp_path / "report.pdf", format="A4")
    assert (tmp_path / "report.pdf").stat().st_size > 20_000
    assert page.locator("figure:not(:has(.main-svg))").count() == 0


def test_page_of_hundred_runs_is_below_10_mb_and_opens(opened, tmp_path):
    write_runs(tmp_path / "runs", runs=100, epochs=100)
    path = tmp_path / "report.html"
    write_report([tmp_path / "runs"], path)
    assert path.stat().st_size < 10e6
    drawn_one(opened(path).locator("figure[id$=accuracy-against-cost]").first)
