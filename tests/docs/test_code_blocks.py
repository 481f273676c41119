"""Every code block of the documentation runs, page by page, from top to bottom."""

from __future__ import annotations

import json
import logging
import re

import pytest
import yaml

from sparsesam.lab.commands import COMMANDS
from tests.docs import pages
from tests.docs.setups import SETUPS, usual

PAGES = ["README.md", "CONTRIBUTING.md", *(str(one.relative_to(pages.ROOT)) for one in pages.ROOT.glob("docs/*.md"))]

#: Packages without which a page's blocks cannot run.
NEEDS = {
    "docs/lightning.md": ("pytorch_lightning", "lightning_fabric"),
    "docs/hugging-face.md": ("transformers", "accelerate", "peft"),
    "docs/accelerate.md": ("accelerate",),
    "docs/ignite.md": ("ignite",),
    "docs/keras.md": ("keras",),
    "docs/quick-start.md": ("sklearn",),
}


#: Runs on two ranks, in tests/distributed/test_page.py.
ELSEWHERE = "docs/multi-gpu.md"


@pytest.mark.parametrize("page", [page for page in PAGES if pages.blocks(page) and page != ELSEWHERE])
@pytest.mark.filterwarnings("ignore")
def test_python_blocks_run(page, tmp_path, monkeypatch):
    for package in NEEDS.get(page, ()):
        pytest.importorskip(package)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    monkeypatch.chdir(tmp_path)
    names = usual(tmp_path)
    if page in SETUPS:
        names.update(SETUPS[page](tmp_path))
    for number, block in enumerate(pages.blocks(page)):
        exec(compile(block, f"{page}, block {number}", "exec"), names)


@pytest.mark.parametrize("page", PAGES)
def test_other_blocks_can_be_read(page):
    for block in pages.blocks(page, "yaml"):
        assert yaml.safe_load(block)
    for block in pages.blocks(page, "json"):
        assert json.loads(block)


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page):
    text = (pages.ROOT / page).read_text()
    used = re.findall(r"^    (?:\$ )?sparsesam ([a-z]+)", text, flags=re.MULTILINE)
    assert set(used) <= set(COMMANDS)
    targets = set(re.findall(r"^([a-z]+):", (pages.ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"(?:`|^    )make ([a-z]+)", text, flags=re.MULTILINE)) <= targets
