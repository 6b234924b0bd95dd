"""A stand-in for `atroposlib.envs.base` 0.4.0, which needs gigabytes: the same calls in the same order, without models.

Its tokenizer writes as `lachesis.testing.FakeInference` does.
"""

SPECIAL = ["<end>", "<system>", "<user>", "<assistant>", "<tool>"]


class BaseEnvConfig:
    """As pydantic's models: `model_fields`, `model_dump`, `model_validate`."""

    defaults = {"group_size": 4, "max_token_length": 2048, "tokenizer_name": "none", "use_wandb": True}
    model_fields = defaults

    def __init__(self, **fields):
        self.__dict__.update({**self.defaults, **fields})

    def model_dump(self):
        return dict(self.__dict__)

    @classmethod
    def model_validate(cls, fields):
        return cls(**fields)


class Tokenizer:
    chat_template = "one"
    bos_token_id = None

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize
        text = "".join(f"<{one['role']}>{one['content']}<end>\n" for one in messages)
        return text + "<assistant>" * add_generation_prompt

    def encode(self, text, add_special_tokens=True):
        ids = []
        while text:
            special = next((one for one in SPECIAL if text.startswith(one)), None)
            ids.append(ord(text[0]) + len(SPECIAL) if special is None else SPECIAL.index(special))
            text = text[len(special or "x") :]
        return ids

    def decode(self, ids, skip_special_tokens=False):
        shown = [SPECIAL[i] if i < len(SPECIAL) else chr(i - len(SPECIAL)) for i in ids]
        return "".join(one for one in shown if not (skip_special_tokens and one in SPECIAL))


class ServerManager:
    def __init__(self, configs, server_class):
        self.servers = [server_class(one) for one in configs]

    async def tokens_and_logprobs_completion(self, **kwargs):
        return await self.servers[0].tokens_and_logprobs_completion(**kwargs)


class BaseEnv:
    server_cls = None

    def __init__(self, config, server_configs, slurm=False, testing=False):
        self.config = config
        self.server = ServerManager(server_configs, self.server_cls)
        self.tokenizer = Tokenizer()
        self.max_token_len = -1

    async def postprocess_histories(self, groups):
        return groups
