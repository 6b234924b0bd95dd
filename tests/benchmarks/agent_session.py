"""Prints a session of an agent with `lachesis mcp` as Markdown, from finding an environment to results.

    python tests/benchmarks/agent_session.py > services/agent/SESSION.md

A real client of the protocol over stdio, real services, and a model with random weights. Long answers are cut.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).parents[1]))

from integration.agent.test_mcp import Agent, over_stdio
from integration.harness import CONFIG, SUMS

from lachesis.pipeline.model.policy import build_tiny_policy, save_policy

LINES, WIDTH = 24, 110
POLICY = """
preset = "rl"
[fields."training.steps"]
min = 1
max = 5000
value = 5000
[fields."environments.*.longest_tokens"]
locked = true
value = 64
[fields."environments.*.concurrency"]
locked = true
value = 4
[fields."environments.*.samples"]
value = 4
[fields."batching.batch_size"]
min = 8
max = 64
value = 16
"""
HEAD = """# A session of an agent

What an agent asked `lachesis mcp` and was answered, from finding an environment to the results of a run.
`python tests/benchmarks/agent_session.py` prints it: the official client of the protocol over stdio, real services, and
a model with random weights, so that nothing is learned in it. Long answers are cut where `...` stands.
"""


class Session:
    """Prints each call and what it is answered."""

    def __init__(self, agent: Agent, folder: Path) -> None:
        self._agent = agent
        self._folder = str(folder)

    async def ask(self, said: str, tool: str, *, part: str | None = None, **arguments: Any) -> Any:
        """`part`: the part of the answer that is shown."""
        answer = await self._agent.ask(tool, **arguments)
        self._print(said, tool, arguments, json.dumps(answer if part is None else {part: answer[part]}, indent=1))
        return answer

    async def until_step(self, run: str, step: int) -> None:
        with anyio.fail_after(300):
            while ((await self._agent.ask("rl_check_status", run_id=run))["metrics"].get("step") or 0) < step:
                pass

    async def refused(self, said: str, tool: str, **arguments: Any) -> None:
        self._print(said, tool, arguments, await self._agent.refused(tool, **arguments))

    def _print(self, said: str, tool: str, arguments: dict[str, Any], answer: str) -> None:
        given = ", ".join(f"{name}={json.dumps(value)}" for name, value in arguments.items())
        lines = [
            line if len(line) <= WIDTH else line[:WIDTH] + " ..." for line in self._without_places(answer).splitlines()
        ]
        shown = lines if len(lines) <= LINES else [*lines[:LINES], "..."]
        print(f"\n**{said}**\n\n```\n{tool}({given})\n\n" + "\n".join(shown) + "\n```")

    def _without_places(self, text: str) -> str:
        return text.replace(self._folder, "/home/me/work").replace(str(Path(__file__).parents[2]), "/home/me/lachesis")


async def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_policy(build_tiny_policy(0, width=32, layers=1, heads=2, max_length=64), folder / "model")
        (folder / "base.toml").write_text(f'model = "model"\n{CONFIG.format(sums=SUMS, steps=1000)}')
        (folder / "policy.toml").write_text(POLICY)
        print(HEAD, end="")
        async with over_stdio(folder) as agent:
            await session(Session(agent, folder))


async def session(agent: Session) -> None:
    await agent.ask("Which environments are there?", "rl_list_environments")
    await agent.ask("Take one.", "rl_select_environment", name="sums")
    await agent.ask("What may I change?", "rl_get_current_config", section="batching")
    await agent.ask("Smaller batches.", "rl_edit_config", field="batch_size", value=8)
    await agent.refused("A higher learning rate.", "rl_edit_config", field="learning_rate", value=1e-3)
    await agent.ask(
        "Do answers come, and are they rated?", "rl_test_inference", part="models", num_steps=2, group_size=4
    )
    run = (await agent.ask("Start.", "rl_start_training"))["run_id"]
    await agent.until_step(run, 20)
    await agent.ask("How far is it?", "rl_check_status", part="metrics", run_id=run)
    await agent.ask("Is anything wrong with it?", "rl_health", run_id=run)
    await agent.ask("Which groups were there?", "rl_list_rollouts", run_id=run, limit=2)
    await agent.ask("Enough.", "rl_stop_training", run_id=run)
    await agent.ask("What came of it?", "rl_get_results", run_id=run)
    await agent.ask("Which runs are there?", "rl_list_runs")


if __name__ == "__main__":
    anyio.run(main)
