"""Agents of two frameworks, as their documents write them. Run as programs of samples: `framework_agents.py NAME`."""

import asyncio
import json
import os
import sys
import urllib.request
from pathlib import Path


def report(**rewards: float) -> None:
    body = json.dumps({"rewards": rewards}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["LACHESIS_SESSION_URL"] + "/reward", body, headers)  # noqa: S310
    urllib.request.urlopen(request, timeout=60).close()  # noqa: S310


def prompt() -> str:
    return json.loads(Path(os.environ["LACHESIS_TASK"]).read_text())["prompt"]


def openai_agents() -> str:
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(disabled=True)  # it would be sent to OpenAI

    @function_tool
    def add(a: int, b: int) -> int:
        """Return a + b."""
        return a + b

    async def work() -> str:
        agent = Agent(name="adder", instructions="Use the tool.", tools=[add], model="policy")
        first = await Runner.run(agent, prompt())  # by responses
        streamed = Runner.run_streamed(agent, [*first.to_input_list(), {"role": "user", "content": prompt()}])
        async for _ in streamed.stream_events():
            pass
        model = OpenAIChatCompletionsModel(model="policy", openai_client=AsyncOpenAI())
        third = await Runner.run(agent.clone(model=model), prompt())
        return " ".join(str(one.final_output) for one in (first, streamed, third))

    return asyncio.run(work())


def smolagents() -> str:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    @tool
    def add(a: int, b: int) -> int:
        """Return a + b.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    model = OpenAIModel(
        model_id="policy",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        tool_choice="auto",  # else each call is forced, and forced answers are not trained on
    )
    return str(ToolCallingAgent(tools=[add], model=model).run(prompt()))


if __name__ == "__main__":
    found = {"openai-agents": openai_agents, "smolagents": smolagents}[sys.argv[1]]()
    report(right=float("5" in found))
    print(found)
