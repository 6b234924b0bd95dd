"""An environment of the project as `reset` and `step`, with an engine of your own."""

from lachesis import GeneratedSample, StepEnv, WeightVersionSpan


def play(env: StepEnv, engine, seed: int) -> float:
    """`engine(prompt_ids)` samples an answer: its token ids with the stop token, their logprobs, and its text."""
    _, info = env.reset(seed=seed)
    while True:
        ids, logprobs, text = engine(info["prompt_ids"])
        span = WeightVersionSpan(version="0", start=0, end=len(ids))
        action = GeneratedSample(
            token_ids=ids, logprobs=logprobs, text=text, finish_reason="stop", weight_versions=[span]
        )
        _, reward, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            return reward  # info["tokens"], ["loss_mask"] and ["logprobs"] are the sequence to train on
