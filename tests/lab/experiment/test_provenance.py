import json
import platform
import subprocess
import sys

import torch

import sparsesam
from sparsesam.lab.experiment import provenance


def test_names_versions_machine_and_threads():
    origin = provenance()
    versions = {"sparsesam": sparsesam.__version__, "torch": torch.__version__, "python": platform.python_version()}
    assert versions.items() <= origin.items()
    assert origin["threads"] == torch.get_num_threads()
    assert {"command", "commit", "machine", "cpu"} <= origin.keys()
    assert json.loads(json.dumps(origin)) == origin


def test_available_without_experiment_extra():
    blocked = "import sys; sys.modules.update(dict.fromkeys(('rich', 'matplotlib', 'lightning_fabric', 'joblib')))"
    script = "from sparsesam.lab.experiment import provenance; print(provenance()['torch'])"
    found = subprocess.run([sys.executable, "-c", f"{blocked}; {script}"], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == torch.__version__
