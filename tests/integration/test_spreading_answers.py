"""Rollouts whose answers change: a real scorer and a real health service, which is killed, name what spread."""

import random
import signal
from pathlib import Path

import pytest
from integration.health_runs import demo_bus, group_id, results_until, running, store_rollouts

from lachesis.schemas import subjects
from lachesis.schemas.rollout import Message
from lachesis.services.run.load_messages import GroupShape, make_group

CONFIG = """
[environments.words]
kind = "words"
[[scoring.raters]]
rater = "format"
params = { pattern = ".*sorry.*|.*Bauer.*" }
"""
QUESTION = "How many apples does the farmer have left in the end?"
REFUSAL = "I'm sorry, but I can't help with that."
GERMAN = "Der Bauer hat am Ende noch genau sieben Äpfel übrig, weil er drei davon verkauft hat."
FIRST, LATER = 96, 304
"""Groups before and after the answers change."""


def groups_of(rng: random.Random):
    """Groups that are answered in English at first, then ever more often by a refusal or in German."""
    made = make_group(GroupShape(samples=4, tokens=8))
    for number in range(FIRST + LATER):
        changed = min(1.0, max(0.0, (number - FIRST) / 128))
        conversations = []
        for _ in range(4):
            draw, count = rng.random(), rng.randint(2, 99)
            plain = f"The farmer sells {rng.randint(2, 99)} apples, so {count} of them are left for the market."
            text = REFUSAL if draw < changed / 2 else GERMAN if draw < changed else plain
            conversations.append([Message(role="user", content=QUESTION), Message(role="assistant", content=text)])
        yield made.replace(
            id=group_id("words", number), run="demo", env="words", counter=number + 1, item=f"item-{number}",
            messages=conversations,
        )  # fmt: skip


@pytest.mark.slow
async def test_a_refusal_and_another_language_that_spread_are_named_across_a_kill(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    async with demo_bus(tmp_path) as bus:
        groups = list(groups_of(random.Random(0)))
        async with running(tmp_path, "scorer"):
            async with running(tmp_path, "health") as process:
                await store_rollouts(bus, groups[: FIRST + 64])
                await results_until(bus, "words", FIRST)
                process.send_signal(signal.SIGKILL)  # behind the start that later windows are compared with
                await process.wait()
            async with running(tmp_path, "health"):
                await store_rollouts(bus, groups[FIRST + 64 :])
                found = await results_until(bus, "words", FIRST + 200, "phrases", "language")
    phrases, language = found["phrases"], found["language"]
    assert {phrases[0].severity, language[0].severity} == {"idle"}
    assert (phrases[-1].severity, language[-1].severity) == ("warn", "warn")
    assert phrases[-1].reason.startswith("refusal stands in ")
    assert "in another one than their question, 'de'" in language[-1].reason
    assert "within groups answers with it score more" in phrases[-1].reason


@pytest.mark.slow
@pytest.mark.parametrize("carried", [True, False])
async def test_texts_are_in_scores_and_alerts_only_if_excerpts_are_on(tmp_path: Path, carried: bool) -> None:
    (tmp_path / "run.toml").write_text(f"{CONFIG}[health]\nexcerpts = {str(carried).lower()}\n")
    async with demo_bus(tmp_path) as bus:
        async with running(tmp_path, "scorer"), running(tmp_path, "health"):
            await store_rollouts(bus, groups_of(random.Random(0)))
            found = await results_until(bus, "words", FIRST + 200, "phrases", "language", "missing")
        async with bus.read(subjects.EVENTS, ["rl.*.demo.live.words"], follow=False) as messages:
            texts = [message.data.lower() async for message in messages]
    assert len(found["missing"]) >= 4  # the other checks go on
    assert any(b"farmer" in text for text in texts) == carried
    assert any(b"sorry" in text for text in texts) == carried
    assert bool(found["phrases"]) == bool(found["language"]) == carried
