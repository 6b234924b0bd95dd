"""A pool of processes that a user's code starts ends its workers, and not the service."""

import os
import subprocess
import sys

import anyio
import anyio.lowlevel
import pytest

from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.common import user_code
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.runtime.service import Service
from lachesis.services.process import forked_children

PROGRAM = """
import multiprocessing, signal, sys, anyio, anyio.to_thread
from lachesis.services.process.forked_children import separate_forked_children

def rate():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.map(len, ["ab"])[0]  # the pool ends its worker by SIGTERM

async def main():
    if sys.argv[1] == "separate":
        separate_forked_children()
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        print(await anyio.to_thread.run_sync(rate))
        with anyio.move_on_after(0.3):
            async for number in signals:
                print("told to drain")
                break

anyio.run(main)
"""


def output(how: str) -> str:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


@pytest.mark.slow
@pytest.mark.outside
def test_the_end_of_a_pool_does_not_drain_the_service() -> None:
    assert output("separate") == "2\n"


RETURNING = """
import os, sys
from lachesis.pipeline.common.user_code import forks_that_returned, mark_own_process, refuse_forked

mark_own_process("environment-a")
for _ in range(int(sys.argv[1])):
    pid = os.fork()  # what a user's code does
    refuse_forked("its code")
    os.waitpid(pid, 0)
found = forks_that_returned()
print(set(found), len(found) if len(found) < 1000 else "many", forks_that_returned())
"""


@pytest.mark.outside
@pytest.mark.parametrize(("forks", "said"), [(0, "set() 0 []"), (3, "{'its code'} 3 []")])
def test_code_that_forks_and_comes_back_is_told_to_the_service(forks: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RETURNING, str(forks)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == said
    assert done.stderr.count("which came back into the service: it is ended") == forks


async def test_a_fork_that_came_back_is_a_notice_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(MemoryBus(), "environment", "r")
    reports, reporting = os.pipe()
    os.set_blocking(reports, False)
    monkeypatch.setattr(user_code, "_fork_reports", (reports, reporting))
    with os.fdopen(reports), os.fdopen(reporting, "w") as forked, anyio.fail_after(30):
        async with background() as tasks:
            tasks.start_soon(forked_children.tell_returned_forks, service)
            for said, count in (("its code\n", "1 process"), ("its code\nrater a\n", "3 processes")):
                forked.write(said)
                forked.flush()
                while count not in service.vitals.problems.get("forked", ""):
                    await anyio.lowlevel.checkpoint()
    assert service.vitals.problems["forked"].startswith("rater a has forked 3 processes that came back")
    assert service.vitals.problem_details["forked"].until_s < float("inf")
