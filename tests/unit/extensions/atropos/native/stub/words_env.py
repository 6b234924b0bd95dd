"""An environment on the stand-in library; its settings say how it misbehaves."""

import asyncio
import os
import random
import signal
import time
from pathlib import Path

from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from atroposlib.envs.server_handling.server_baseline import APIServerConfig


class WordsConfig(BaseEnvConfig):
    defaults = {**BaseEnvConfig.defaults, "how": "", "flag": "", "temperature": None}
    model_fields = defaults


class Words(BaseEnv):
    @classmethod
    def config_init(cls):
        return WordsConfig(), [APIServerConfig(model_name="x"), APIServerConfig(model_name="x")]

    async def setup(self):
        print("a line for the log")
        self.made = 0
        if self.config.how == "setup fails":
            raise RuntimeError("no data set here")
        if self.config.how == "named":
            self.curriculum_items = {"one": "a", "two": "b"}

    async def get_next_item(self):
        self.made += 1
        if self.config.how == "unseeded":
            return os.urandom(4).hex()
        return {"word": f"{self.made}-{random.randrange(10**9)}"}

    def _once(self):
        """Whether this is the first process that comes here."""
        try:
            with Path(self.config.flag).open("x"):
                return True
        except FileExistsError:
            return False

    async def collect_trajectories(self, item):
        if self.config.how == "turns":
            return await self._of_turns(item["word"]), []
        return await self._of_one_turn(item)

    async def _of_one_turn(self, item):
        how = self.config.how
        if how == "killed once" and self._once():
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hangs once" and self._once():
            time.sleep(10**6)  # noqa: ASYNC251 - what is to be found out
        if how == "waits":
            await asyncio.sleep(10**6)
        if how == "bug":
            raise KeyError("no such word")
        if how == "none":
            return None, []
        word = item["word"] if isinstance(item, dict) else item
        prompt = self.tokenizer.apply_chat_template([{"role": "user", "content": word}], False, True)
        arguments = {} if self.config.temperature is None else {"temperature": self.config.temperature}
        if how == "unknown argument":
            arguments["beam_width"] = 4
        ids, outputs, logprobs, reasons = await self.server.tokens_and_logprobs_completion(
            prompt=prompt, n=self.config.group_size, max_tokens=50, **arguments
        )
        group = {"tokens": [], "masks": [], "scores": [], "overrides": []}
        for number, output in enumerate(outputs):
            if how == "tokenized again":
                output = self.tokenizer.encode(self.tokenizer.decode(output).upper())  # noqa: PLW2901
            if how == "cut":
                output = output[:-1]  # noqa: PLW2901
            group["tokens"].append([*ids, *output])
            group["masks"].append([-100] * len(ids) + list(output))
            group["scores"].append(float(number))
            group["overrides"].append({"set_advantage_to_zero": number == 1} if how == "overrides" else {})
        assert len(logprobs) == len(reasons) == len(outputs)
        if how == "two groups":
            return [group, {**group, "scores": [10.0 + score for score in group["scores"]]}], []
        if how == "backlog" and item != "later":
            return None, ["later"]
        return group, []

    async def _of_turns(self, word):
        """A conversation of three turns; the score is the number of answers that were "yes"."""
        messages, right = [{"role": "user", "content": word}], 0
        tokens, mask = [], []
        for turn in range(3):
            text = self.tokenizer.apply_chat_template(messages, False, True)
            prompt = self.tokenizer.encode(text)
            assert prompt[: len(tokens)] == tokens
            mask += [-100] * (len(prompt) - len(tokens))
            _, (output,), _, _ = await self.server.tokens_and_logprobs_completion(input_ids=prompt, n=1, max_tokens=9)
            tokens, mask = prompt + output, mask + output
            said = self.tokenizer.decode(output, skip_special_tokens=True)
            right += said == "yes"
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"and {turn}?"}]
        return {"tokens": [tokens], "masks": [mask], "scores": [float(right)]}
