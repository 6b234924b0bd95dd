"""An environment on the real atroposlib, run as its users run it: its answers are made up, all else is the library's.

Run with an interpreter that has atroposlib 0.4: `python atropos_environment.py serve --slurm false ...`.
"""

import random

from atroposlib.envs import base
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class Words(BaseEnv):
    """Groups of four, of tokens that count up; a seed in each prompt tells groups apart."""

    name = "words"

    @classmethod
    def config_init(cls):
        config = BaseEnvConfig(
            tokenizer_name="none",
            group_size=4,
            use_wandb=False,
            wandb_name="words",
            max_token_length=64,
            total_steps=6,
            max_num_workers=4,
            steps_per_eval=1000,
            include_messages=True,
        )
        server = APIServerConfig(
            model_name="none", base_url="http://127.0.0.1:1/v1", health_check=False, api_key="none"
        )
        return config, [server, server]

    async def setup(self):
        self.made = 0

    async def get_next_item(self):
        self.made += 1
        return self.made

    async def collect_trajectories(self, item):
        prompt = [2, random.randrange(1000, 60000)]
        rows = [[*prompt, *(10 + i + t for t in range(30))] for i in range(4)]
        group = ScoredDataGroup(
            tokens=rows,
            masks=[[-100, -100, *row[2:]] for row in rows],
            scores=[float(i % 2) for i in range(4)],
            messages=[[{"role": "user", "content": "q"}, {"role": "assistant", "content": str(i)}] for i in range(4)],
        )
        group["inference_logprobs"] = [[1.0, 1.0] + [-0.5] * 30 for _ in rows]
        group["overrides"] = [{}, {"set_advantage_to_zero": True}, {}, {}]
        return group, []

    async def evaluate(self, *args, **kwargs):
        return None


class NoTokenizer:
    """Nothing here is text."""

    @classmethod
    def from_pretrained(cls, name):
        return cls()

    def decode(self, tokens):
        return ""


base.AutoTokenizer = NoTokenizer

if __name__ == "__main__":
    Words.cli()
