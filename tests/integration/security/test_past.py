"""Training on history with the operator's key and rebuilding it with the observer's, on a server with permissions."""

from pathlib import Path

import anyio
import msgspec
import numpy as np
import pytest
import torch
from integration.security.conftest import RUN
from integration.security.secured import Secured, auth_init
from stages import run_trainer

from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.errors import AccessError
from lachesis.pipeline.ledger.offline_start import OfflineStart
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.pipeline.offline.replay.stage import ReplayRequest, run_replay
from lachesis.pipeline.offline.reproduction.batches import verify_batches
from lachesis.pipeline.offline.trainer.ledger import OfflineRequest, open_offline_ledger, read_offline_trainer
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.pipeline.trainer.stage import OfflineRun
from lachesis.schemas import subjects
from lachesis.schemas.replay import Selection
from lachesis.schemas.rollout import Message
from lachesis.services.cli.train import offline_config


@pytest.mark.slow
async def test_the_operator_trains_on_the_past_and_the_observer_rebuilds_it(
    tmp_path: Path, streams_config: StreamsConfig, make_lab
) -> None:
    auth_init(tmp_path, config=RUN)
    policy = build_tiny_policy(0, width=16, layers=1, heads=2, max_length=32)
    save_policy(policy, tmp_path / "model")
    config = RunConfig(
        run="one", folder=str(tmp_path / "run"), model=str(tmp_path / "model"),
        environments={"words": EnvironmentConfig(kind="reasoning_gym")},
        scoring=ScoringConfig(raters=[RaterConfig(rater="exact_match")]),
    )  # fmt: skip
    config = msgspec.structs.replace(config, batching=msgspec.structs.replace(config.batching, batch_size=16))
    draw = np.random.default_rng(1)
    async with Secured(tmp_path, "one", tls=False) as server:
        async with await server.bus("operator") as operator:
            await operator.ensure_streams(streams_config)
            async with await server.bus("environment-words") as environment:
                lab = make_lab(environment)
                lab.run = "one"
                for n in range(1, 30):
                    said = [[Message(role="assistant", content=str(draw.integers(2)))] for _ in range(4)]
                    await lab.store(lab.group(n, env="words", samples=4, messages=said, task={"answer": "1"},
                                              tokenizer_hash=policy.tokenizer_hash))  # fmt: skip
            request = ReplayRequest(revision="again", selection=Selection(envs=["words"]))
            await run_replay(operator, config, request, draining=anyio.Event(), progress=lambda *_: None)
            asked = OfflineRequest(trainer="again", revision="again", model=str(tmp_path / "model"))
            async with open_offline_ledger(operator, config, asked, progress=lambda *_: None) as (record, _):
                own = offline_config(config, record, 2)
                offline = OfflineRun(OfflineStart(), on_trained=lambda _: None, on_durable=lambda _: None)
                await run_trainer(Service(operator, "trainer", "one"), own, offline)
            torch.use_deterministic_algorithms(mode=False)
            for subject in (subjects.ledger("one", "main"), subjects.state("one", "trainer", "live", "main")):
                with pytest.raises(AccessError):
                    await operator.commit(subject, b"", expected=0, msg_id=subject)
        async with await server.bus("observer") as observer:
            past = await read_offline_trainer(observer, "one", "again")
            facts, findings = await verify_batches(observer, own, "again", past, saved={}, progress=lambda *_: None)
            assert [report.step for report in facts.reports] == [2]
            assert {finding.check: finding.verdict for finding in findings} == dict.fromkeys(
                ("chain", "reports", "batches", "order"), "ok"
            )
