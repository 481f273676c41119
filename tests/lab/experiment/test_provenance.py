import json
import platform
import subprocess
import sys

import torch

import sparsesam
from sparsesam.lab.experiment import provenance


def test_names_versions_machine_and_threads():
    origin = provenance()
    assert origin["sparsesam"] == sparsesam.__version__
    assert origin["torch"] == torch.__version__
    assert origin["python"] == platform.python_version()
    assert origin["threads"] == torch.get_num_threads()
    assert {"command", "commit", "machine", "cpu"} <= origin.keys()


def test_is_json_serializable():
    assert json.loads(json.dumps(provenance())) == provenance()


def test_available_without_experiment_extra():
    blocked = "import sys; sys.modules.update(dict.fromkeys(('rich', 'matplotlib', 'lightning_fabric', 'joblib')))"
    script = "from sparsesam.lab.experiment import provenance; print(provenance()['torch'])"
    found = subprocess.run([sys.executable, "-c", f"{blocked}; {script}"], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == torch.__version__
