import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from sparsesam.analysis import (
    Objective,
    loss_landscape,
)
from tests.cases import mlp, same_bits, vectors, weights_of


def objective_of(model, **options):
    return Objective(model, [vectors(12), vectors(5, seed=2)], F.cross_entropy, **options)


def test_weights_come_back_bit_for_bit_also_from_an_exception():
    model = mlp(torch.float32)
    objective = Objective(model, [vectors(4, torch.float32)], F.cross_entropy)
    before = weights_of(model)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loss_landscape(objective, points=3, progress=stop)
    assert same_bits(model.parameters(), before)
    loss_landscape(objective, points=3)
    assert same_bits(model.parameters(), before)


def test_stopped_landscape_goes_on_where_it_was_and_equals_the_uninterrupted(tmp_path):
    objective, file = objective_of(mlp()), tmp_path / "deep" / "state.npz"
    whole = loss_landscape(objective, points=4)

    def stop_at_seven(done, total):
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loss_landscape(objective, points=4, state_file=file, progress=stop_at_seven)
    seen = []
    again = loss_landscape(
        objective, points=4, state_file=file, progress=lambda done, total: seen.append((done, total))
    )
    assert seen == [(done, 16) for done in range(8, 17)]
    assert np.array_equal(again.loss, whole.loss)
    assert [path.name for path in file.parent.iterdir()] == ["state.npz"]


def test_killed_landscape_leaves_a_state_to_go_on_from(tmp_path):
    program = """if True:
        import sys
        from torch.nn import functional as F
        from sparsesam.analysis import Objective, loss_landscape
        from tests.cases import mlp, vectors
        def stop_after_five(done, total):
            print(done, flush=True)
            if done == 5:
                sys.stdin.read()  # until this process is killed
        objective = Objective(mlp(), [vectors(12), vectors(5, seed=2)], F.cross_entropy)
        loss_landscape(objective, points=4, state_file=sys.argv[1], save_every=0.0, progress=stop_after_five)
    """
    file = tmp_path / "state.npz"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        while int(child.stdout.readline() or 99) < 5:
            pass
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdin.close()
        child.stdout.close()
    seen = []
    result = loss_landscape(
        objective_of(mlp()), points=4, state_file=file, progress=lambda done, total: seen.append(done)
    )
    assert seen[0] == 6
    assert np.array_equal(result.loss, loss_landscape(objective_of(mlp()), points=4).loss)


def test_state_file_of_something_else_is_refused_and_kept(tmp_path):
    file = tmp_path / "state.npz"
    loss_landscape(objective_of(mlp()), points=3, state_file=file)
    content = file.read_bytes()
    for other in (objective_of(mlp(seed=1)), objective_of(mlp(), statistics="batch")):
        with pytest.raises(ValueError, match="another landscape"):
            loss_landscape(other, points=3, state_file=file)
    with pytest.raises(ValueError, match="another landscape"):
        loss_landscape(objective_of(mlp()), points=3, seed=1, state_file=file)
    assert file.read_bytes() == content
    file.write_bytes(content[:40])
    with pytest.raises(ValueError, match="not the state of a landscape"):
        loss_landscape(objective_of(mlp()), points=3, state_file=file)


def test_finished_landscape_is_read_without_evaluating(tmp_path):
    objective = objective_of(mlp())
    first = loss_landscape(objective, points=3, state_file=tmp_path / "s.npz")
    again = loss_landscape(
        objective, points=3, state_file=tmp_path / "s.npz", progress=lambda *_: pytest.fail("evaluated")
    )
    assert np.array_equal(first.loss, again.loss)
