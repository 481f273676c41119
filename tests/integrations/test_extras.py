"""Without its package, an integration names the extra to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({packages!r}))  # None: as if it were not installed
import sparsesam.integrations.{module}
"""


@pytest.mark.parametrize(
    ("module", "packages", "extra"),
    [
        ("lightning", ["lightning", "pytorch_lightning"], "sparsesam[lightning]"),
        ("hugging_face", ["transformers"], "sparsesam[huggingface]"),
    ],
)
def test_missing_package_names_extra(module, packages, extra):
    code = WITHOUT.format(module=module, packages=packages)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    message = result.stderr.strip().splitlines()[-1]
    needed = f'sparsesam.integrations.{module} needs {packages[-1]}: pip install "{extra}"'
    assert message == f"ModuleNotFoundError: {needed}"
