import math
import re

import pytest
from benchmarks.__main__ import main
from benchmarks.predict import GPUS, METHODS, Assumptions, all_reduce_ms, exposed_ms, step_ms

GIVEN = Assumptions()


def test_one_gpu_sends_nothing():
    assert all_reduce_ms(1, 1, GIVEN) == 0


def test_all_reduce_matches_formula():
    expected = 1e3 * 2 * 15 / 16 * 25.6e6 * 4 / 25e9 + 2 * 0.015
    assert all_reduce_ms(1, 16, GIVEN) == pytest.approx(expected)


def test_backward_hides_all_but_last_bucket():
    whole = all_reduce_ms(1, 64, GIVEN)
    bucket = all_reduce_ms(25 * 2**20 / (25.6e6 * 4), 64, GIVEN)
    assert exposed_ms(1, 64, math.inf, GIVEN) == pytest.approx(bucket)
    assert exposed_ms(1, 64, 0, GIVEN) == pytest.approx(whole)


@pytest.mark.parametrize("gpus", GPUS)
def test_local_ascent_sends_as_much_as_sgd(gpus):
    """Its extra time over SGD is the same on any number of GPUs."""
    beyond = [step_ms(METHODS["SAM, local"], n, GIVEN) - step_ms(METHODS["SGD"], n, GIVEN) for n in (1, gpus)]
    assert beyond[0] == pytest.approx(beyond[1])
    assert step_ms(METHODS["SAM, local"], gpus, GIVEN) < step_ms(METHODS["SAM, global"], gpus, GIVEN)


@pytest.mark.parametrize("arguments", ["", "--parameters 350e6 --pass-ms 60"])
def test_page_shows_output_of_command(arguments, capsys, pytestconfig):
    main(["predict", *arguments.split()])
    printed = re.sub(r"-{3,}", "---", re.sub(" +", " ", capsys.readouterr().out))  # the page's columns are not aligned
    page = (pytestconfig.rootpath / "docs" / "accelerators.md").read_text()
    assert printed[printed.index("| GPUs") :].strip() in page
