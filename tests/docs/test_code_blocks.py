"""Every code block of the documentation runs, page by page, from top to bottom; and every example of a docstring."""

from __future__ import annotations

import doctest
import inspect
import json
import logging
import re
import shlex
from importlib import import_module

import pytest
import yaml

import sparsesam
from sparsesam.lab.cli import COMMANDS
from sparsesam.lab.commands.parser import Parser
from tests.docs import pages
from tests.docs.setups import SETUPS, usual

PAGES = ["README.md", "CONTRIBUTING.md", *(str(page.relative_to(pages.ROOT)) for page in pages.ROOT.glob("docs/*.md"))]

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
    if page == "docs/quick-start.md":
        assert min(names["sam"], names["ssam"], names["one_pass"]) > names["sgd"] + 0.01


@pytest.mark.parametrize("page", PAGES)
def test_yaml_and_json_blocks_parse(page):
    for block in pages.blocks(page, "yaml"):
        assert yaml.safe_load(block)
    for block in pages.blocks(page, "json"):
        assert json.loads(block)


def commands_in(text):
    """Commands in blocks, joined and without comments, and inline; those that only name a command are left out."""
    blocks = re.findall(r"^    (?:\$ |PYTHONPATH=. )?sparsesam ((?:.*\\\n)*.*)$", text, flags=re.MULTILINE)
    inline = re.findall(r"`sparsesam ([^`\n]+)`", text)
    found = (command.replace("\\\n", " ") for command in (*blocks, *inline))
    return [command for command in found if "…" not in command and not command.startswith("COMMAND")]


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page):
    """Parsing raises for unknown options and invalid values."""
    for line in commands_in((pages.ROOT / page).read_text()):
        command, *arguments = shlex.split(line, comments=True)
        assert command in COMMANDS
        module = import_module(f"sparsesam.lab.commands.{command}")
        parser = Parser(f"sparsesam {command}", module.__doc__)
        module.add_arguments(parser)
        if arguments:
            parser.parse_args(arguments)


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page):
    text = (pages.ROOT / page).read_text()
    targets = set(re.findall(r"^([a-z]+):", (pages.ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"(?:`|^    )make ([a-z]+)", text, flags=re.MULTILINE)) <= targets


@pytest.mark.parametrize("name", sorted(set(sparsesam.__all__) - {"NORMALIZATION"}))
def test_public_name_has_docstring_whose_examples_run(name, tmp_path):
    text = inspect.getdoc(getattr(sparsesam, name))
    assert text, f"{name} has no docstring"
    example = doctest.DocTestParser().get_doctest(text, usual(tmp_path), name, None, None)
    assert doctest.DocTestRunner().run(example).failed == 0
