"""A fake inference server, for unit tests of environments and for trying them before a run.

No model, no network, the same answers every time.

Text is split into characters. Its chat template writes `<role>content<end>` and a newline for each message and
`<assistant>` to prompt an answer, with `<...>` as single tokens, so that masks can be checked by eye: `show(ids)`.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio.lowlevel
import numpy as np

from lachesis.pipeline.environment.matching_answer import matching_answer
from lachesis.pipeline.inference.answered_sample import GeneratedSample
from lachesis.pipeline.inference.protocol import SamplingParams, StructuredOutputs, WeightVersionSpan
from lachesis.schemas.errors import DataError

__all__ = ["FakeInference"]

_SPECIAL = ["<end>", "<system>", "<user>", "<assistant>", "<tool>"]
_END = 0


class FakeInference:
    """Answers by `reply(prompt, call)`: the prompt as `show` prints it, and the number of the sample since the start.

    Where a request says what an answer must match, it gets one that does, whatever `reply` says; `forced` counts these.
    `refused` has the reasons why there was none. `version` is the policy version all tokens come from. It may be
    changed between calls. `requests` holds the (prompt ids, n, sampling) of every `generate`. Raise from `reply` to
    play a failing server.
    """

    def __init__(self, reply: Callable[[str, int], str], version: str = "0-fake-0000") -> None:
        self.reply = reply
        self.version = version
        self.requests: list[tuple[list[int], int, SamplingParams]] = []
        self.template_kwargs: dict[str, Any] = {}
        self.forced = 0
        self.refused: list[str] = []
        self._samples = 0

    async def tokenize(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Return the ids of chat messages. Roles: system, user, assistant, tool. Raises `DataError` for tools.

        Its template has no parameters; those that it is given are kept in `template_kwargs`.
        """
        if tools:
            raise DataError("the chat template does not read `tools`")
        self.template_kwargs = dict(chat_template_kwargs or {})
        ids = []
        for message in messages:
            ids += [_SPECIAL.index(f"<{message['role']}>"), *_encode(message["content"]), _END, *_encode("\n")]
        return [*ids, _SPECIAL.index("<assistant>")] if add_generation_prompt else ids

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        return self.show(token_ids)

    async def generate(
        self, prompt_ids: Sequence[int], n: int, sampling: SamplingParams | None = None
    ) -> list[GeneratedSample]:
        """Return the replies, each cut at `max_tokens` and otherwise closed by `<end>`.

        Raises `DataError` if they must match something that `matching_answer` does not follow.
        """
        sampling = sampling or SamplingParams()
        self.requests.append((list(prompt_ids), n, sampling))
        await anyio.lowlevel.checkpoint()
        return [self._generation(self.show(prompt_ids), sampling) for _ in range(n)]

    def _text(self, prompt: str, wanted: StructuredOutputs | None) -> str:
        if wanted is None:
            return self.reply(prompt, self._samples)
        self.forced += 1
        try:
            return matching_answer(wanted, self._samples)
        except DataError as error:
            self.refused.append(str(error))
            raise

    def _generation(self, prompt: str, sampling: SamplingParams) -> GeneratedSample:
        text, max_tokens = self._text(prompt, sampling.structured_outputs), sampling.max_tokens
        self._samples += 1
        ids = [*_encode(text), _END]
        cut = max_tokens is not None and len(ids) > max_tokens
        if cut:
            ids, text = ids[:max_tokens], text[:max_tokens]
        # any fixed function of the token will do, as long as two tokens seldom share a value
        logprobs = [-1 - hashlib.blake2b(b"%d" % token, digest_size=1).digest()[0] / 64 for token in ids]
        return GeneratedSample(
            token_ids=np.array(ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            text=text,
            finish_reason="length" if cut else "stop",
            weight_versions=[WeightVersionSpan(version=self.version, start=0, end=len(ids))],
        )

    @staticmethod
    def show(token_ids: Sequence[int]) -> str:
        """Return ids as text, special tokens as `<...>`."""
        return "".join(_SPECIAL[i] if i < len(_SPECIAL) else chr(i - len(_SPECIAL)) for i in token_ids)


def _encode(text: str) -> list[int]:
    return [ord(character) + len(_SPECIAL) for character in text]
