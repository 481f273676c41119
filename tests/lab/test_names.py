"""Models and data sets named as module:function: the example of docs/command-line.md."""

import re
from pathlib import Path

from sparsesam.lab.cli import main

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
