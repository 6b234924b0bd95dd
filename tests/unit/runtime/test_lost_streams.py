"""The streams of a run are looked at together; what one look meets is raised as itself."""

from typing import Any

import anyio
import pytest

from lachesis.pipeline.errors import InfrastructureError, NotFoundError
from lachesis.pipeline.runtime.lost_streams import find_streams

KINDS = ("ROLLOUTS", "EVENTS", "LEDGER")


class Server:
    """Answers no request before all are there."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.requests: list[str] = []
        self.all_there = anyio.Event()

    async def usage(self, kind: str) -> Any:
        self.requests.append(kind)
        if len(self.requests) == len(self.answers):
            self.all_there.set()
        await self.all_there.wait()
        if isinstance(answer := self.answers[kind], Exception):
            raise answer
        return answer


async def find(server: Any) -> Any:
    with anyio.fail_after(20):
        return await find_streams(server, KINDS)


async def test_all_streams_are_requested_before_the_first_answer():
    server = Server({"ROLLOUTS": 1, "EVENTS": NotFoundError("none"), "LEDGER": 3})
    assert list((await find(server)).items()) == [("ROLLOUTS", 1), ("LEDGER", 3)]


async def test_a_server_that_is_away_is_one_error_not_a_group_of_them():
    server = Server({kind: InfrastructureError(f"{kind} is away") for kind in KINDS})
    with pytest.raises(InfrastructureError):
        await find(server)
