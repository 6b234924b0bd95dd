"""A unit test that starts a process or uses a socket fails, even where the code under test catches the error."""

import multiprocessing
import os
import socket
import subprocess
import sys

import outside
import pytest


@pytest.fixture
def tried():
    """What this test tries, which is then forgotten: trying is its task."""
    yield outside._tried
    outside._tried.clear()


def test_processes_and_sockets_are_refused(tried):
    with socket.socket() as it:
        for attempt in (
            lambda: subprocess.run([sys.executable, "-c", ""], check=False),
            lambda: os.posix_spawn(sys.executable, [sys.executable], {}),
            multiprocessing.get_context("fork").Process(target=print).start,
            multiprocessing.get_context("spawn").Process(target=print).start,
            lambda: it.bind(("127.0.0.1", 0)),
            lambda: it.connect(("127.0.0.1", 9)),
        ):
            before = len(tried)
            with pytest.raises(outside.OutsideError, match="mark it"):
                attempt()
            assert len(tried) == before + 1


def test_an_attempt_whose_error_is_caught_fails_the_test_at_its_end(request):
    try:
        subprocess.run([sys.executable, "-c", ""], check=False)
    except Exception as error:  # noqa: BLE001 - as code under test might
        assert type(error) is outside.OutsideError  # noqa: PT017
    ending = outside.pytest_runtest_teardown(request.node)
    next(ending)
    with pytest.raises(pytest.fail.Exception, match="outside"):
        ending.send(None)


@pytest.mark.outside
def test_a_test_that_is_marked_may():
    assert subprocess.run([sys.executable, "-c", ""], check=False).returncode == 0
