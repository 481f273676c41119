import json
import platform

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


def test_can_be_written_as_json():
    assert json.loads(json.dumps(provenance())) == provenance()
