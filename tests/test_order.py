"""In which order the processes of `make test` and `make test-all` take the groups of tests."""
import os
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.conftest import pytest_xdist_make_scheduler

pytest.importorskip("xdist")

DEPLOY = [f"tests/deploy/test_a.py::test_{number}" for number in range(8)]
COMPUTE = [f"tests/test_{name}.py::test_{number}" for name in "bcdef" for number in range(4)]


class Process:
    """What the scheduler sees of a process: the tests that it was given and has not run."""

    def __init__(self):
        self.tests, self.shutting_down, self.gateway = [], False, SimpleNamespace(id="name")

    def send_runtest_some(self, places):
        self.tests += [(DEPLOY + COMPUTE)[place] for place in places]

    def shutdown(self):
        self.shutting_down = True


@pytest.mark.parametrize("count, most", [(2, 1), (3, 1), (4, 2)])
def test_on_two_cores_the_processes_above_two_wait_and_the_others_compute_as_long_as_there_are_both(
        count, most, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    config = SimpleNamespace(getvalue=lambda _: [f"{count}*popen"],
                             option=SimpleNamespace(loadscopereorder=False))
    scheduler, processes = pytest_xdist_make_scheduler(config, mock.Mock()), [Process() for _ in range(count)]
    for process in processes:
        scheduler.add_node(process)
        scheduler.add_node_collection(process, DEPLOY + COMPUTE)
    scheduler.schedule()
    done = []
    while any(process.tests for process in processes):
        left = {group.startswith("tests/deploy/") for group in scheduler.workqueue}
        if len(left) == 2:  # both kinds
            assert sum(process.tests[0] in DEPLOY for process in processes) == most
        for process in processes:
            if process.tests:
                done.append(process.tests.pop(0))
                scheduler.mark_test_complete(process, (DEPLOY + COMPUTE).index(done[-1]))
    assert sorted(done) == sorted(DEPLOY + COMPUTE) and scheduler.tests_finished
