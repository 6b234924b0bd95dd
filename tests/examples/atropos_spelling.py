"""Spelling words backward, on atroposlib: its managed server samples the run's policy, its API takes the groups."""

import random

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

LETTERS = "bcdfghjklmnprstvwyz"


class Spelling(BaseEnv):
    name = "spelling"

    @classmethod
    def config_init(cls):
        config = BaseEnvConfig(
            tokenizer_name="model",
            group_size=8,
            use_wandb=False,
            wandb_name="spelling",
            max_token_length=96,
            total_steps=40,
            max_num_workers=16,
            steps_per_eval=1000,
        )
        url = "http://127.0.0.1:9001/v1"
        server = APIServerConfig(model_name="model", base_url=url, api_key="any", server_type="vllm")
        return config, [server, server]

    async def setup(self):
        pass

    async def get_next_item(self):
        word = "".join(random.choice("aeiou" if i % 2 else LETTERS) for i in range(random.randint(3, 5)))
        return {"word": word}

    def score(self, text, word):
        return float(text.strip() == word[::-1])

    async def collect_trajectories(self, item):
        messages = [{"role": "user", "content": f"Spell this word backward (example: sun -> nus): {item['word']}"}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answer = await managed.chat_completion(
                messages=messages, n=self.config.group_size, max_tokens=12, temperature=1.0
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        group["inference_logprobs"] = []
        for choice, node in zip(answer.choices, nodes, strict=True):
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(self.score(choice.message.content, item["word"]))
        return group, []

    async def evaluate(self, *args, **kwargs):
        return None


if __name__ == "__main__":
    Spelling.cli()
