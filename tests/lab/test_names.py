"""Models and data sets named as module:function, and the example of docs/command-line.md."""

import re
from pathlib import Path

import pytest

from sparsesam.lab.cli import main
from sparsesam.lab.names import call_function, find_function

DOCS = Path(__file__).parents[2] / "docs" / "command-line.md"


def test_documented_model_and_data_set_train(tmp_path, monkeypatch, capsys):
    text = DOCS.read_text()
    (code,) = re.findall(r"In `my_task\.py`:\n\n```python\n(.*?)```", text, re.DOTALL)
    (command,) = re.findall(r"PYTHONPATH=\. sparsesam (train --dataset my_task:.*)", text)
    (tmp_path / "my_task.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main([*command.split(), "--logger", "none", "--threads", "1"]) == 0
    accuracy = float(re.search(r"test accuracy ([\d.]+)%", capsys.readouterr().out)[1])
    assert accuracy > 95


def test_errors_of_function_are_one_line(capsys):
    def broken():
        raise KeyError("two\nlines")

    with pytest.raises(ValueError, match=r"^model a:b raised KeyError: 'two\\nlines'$"):
        call_function("model", "a:b", broken)
    with pytest.raises(ValueError, match="dataset must be an importable module:function, got 'nowhere:f'"):
        find_function("dataset", "nowhere:f")
    assert main(["train", "--model", "tests.lab.test_names:DOCS"]) == 2
    printed = capsys.readouterr().err
    assert "must be a function, got PosixPath" in printed
    assert printed.count("\n") == 1
