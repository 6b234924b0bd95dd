"""With a key for each service a store that lost its end is noticed and recovered from as without."""

import os
import signal
from pathlib import Path

import pytest
from integration.damage import cut_last_message
from integration.security.conftest import RUN
from integration.security.secured import Secured, auth_init

from lachesis.pipeline.access import OBSERVER, OPERATOR
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.errors import HistoryLostError
from lachesis.pipeline.ledger.rollbacks import refuse_rolled_back
from lachesis.pipeline.retention.recovery import apply_plan
from lachesis.pipeline.retention.recovery_plan import make_plan
from lachesis.pipeline.runtime import stream_marks
from lachesis.pipeline.runtime.lost_streams import find_streams
from lachesis.pipeline.runtime.store_marks import EndWatch
from lachesis.schemas import keys, subjects
from lachesis.services.stage_settings import ledger_settings, recovery_settings

WRITERS = {
    "ROLLOUTS": ("environment-words", subjects.rollout("one", "words")),
    "EVENTS": ("scorer", subjects.event("score", "one", "live", "words")),
    "TEACHER": ("teacher", subjects.logprobs("one", "live", "words")),
    "WEIGHTS": ("trainer", subjects.weights_heads("one")),
    "LEDGER": ("normalizer", subjects.state("one", "normalizer", "live", "words")),
    "KEYS": ("inference", keys.inference("policy")),
}


@pytest.mark.parametrize(
    "stream",
    [
        "ROLLOUTS",
        "KEYS",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("EVENTS", "TEACHER", "WEIGHTS", "LEDGER")),
    ],
)
async def test_a_lost_end_is_missed_and_recovered_from_with_the_keys_of_each(
    tmp_path: Path, streams_config, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_marks, "BELIEVE_LOSS_S", 0.5)
    auth_init(tmp_path, config=RUN)
    folder = tmp_path / "run"
    folder.mkdir()
    config = RunConfig(run="one", folder=str(folder), environments={"words": EnvironmentConfig(kind="reasoning_gym")})
    identity, place = WRITERS[stream]
    async with Secured(tmp_path, "one", tls=False) as server:
        async with await server.bus(OPERATOR) as operator:
            await operator.ensure_streams(streams_config)
        async with await server.bus(identity) as writer, await server.bus("governor") as governor:
            writer.keep_acknowledged(folder)
            watch = EndWatch(governor, "one", folder)
            await watch.update(await find_streams(governor), None)
            for number in range(2):
                if stream == "KEYS":
                    await writer.put(place, b"%d" % number)
                else:
                    await writer.publish(place, b"%d" % number, msg_id=f"{number}")
            os.kill(server.pid, signal.SIGKILL)
            await server.wait()
            cut_last_message(server.store, stream)
            await server.start_again()
            with pytest.raises(
                HistoryLostError, match=f"{identity}.* of {stream}, .* one acknowledged message is gone"
            ):
                await watch.update(await find_streams(governor), None)
        async with await server.bus(OPERATOR) as operator, await server.bus(OBSERVER) as observer:
            for bus in (operator, observer):
                with pytest.raises(HistoryLostError, match=f"{identity}.* of {stream}, .*lachesis runs recover one"):
                    await refuse_rolled_back(bus, ledger_settings(config))
            plan = await make_plan(operator, recovery_settings(config), "cut")
            assert plan is not None
            await apply_plan(operator, recovery_settings(config), plan)
            await refuse_rolled_back(operator, ledger_settings(config))
