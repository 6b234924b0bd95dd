"""A class of Atropos on the stand-in library of the unit tests, with the run's own tokenizer as real ones have it."""

from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from transformers import AutoTokenizer


class SpelledConfig(BaseEnvConfig):
    letters: str = "ab"
    defaults = {**BaseEnvConfig.defaults, "letters": letters}
    model_fields = defaults


class Spelled(BaseEnv):
    """Counts letters of an answer."""

    env_config_cls = SpelledConfig

    @classmethod
    def config_init(cls):
        return SpelledConfig(), [APIServerConfig(model_name="x"), APIServerConfig(model_name="x")]

    async def setup(self):
        self.tokenizer = AutoTokenizer.from_pretrained(self.config.tokenizer_name)
        self.made = 0

    async def get_next_item(self):
        self.made += 1
        return {"word": f"{self.made}+{self.made}"}

    async def collect_trajectories(self, item):
        chat = [{"role": "user", "content": item["word"]}]
        prompt = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids, outputs, _, _ = await self.server.tokens_and_logprobs_completion(
            input_ids=self.tokenizer.encode(prompt, add_special_tokens=False), n=self.config.group_size, max_tokens=8
        )
        group = {"tokens": [], "masks": [], "scores": []}
        for output in outputs:
            group["tokens"].append([*ids, *output])
            group["masks"].append([-100] * len(ids) + list(output))
            group["scores"].append(self.score(output))
        return group, []

    def score(self, output):
        return float(sum(token % 2 for token in output))


class Flat(Spelled):
    """Gives all answers one score."""

    def score(self, output):
        return 1.0
