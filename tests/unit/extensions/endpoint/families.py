"""Chat templates of four families of models, as they publish them (shortened), on a tokenizer with merges.

They differ in what exactness depends on: where tools are named, how calls are written and ended, which role answers
them, what closes a turn, and whether earlier thoughts are dropped.
"""

import functools
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

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


@functools.cache
def tokenizer_of(family: str) -> Any:
    """Return a byte-level tokenizer with merges, in which a text has many spellings, and a family's template."""
    template, eos, special = _FAMILIES[family]
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
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=eos,
        pad_token=eos,
        bos_token=_BOS[family],
        additional_special_tokens=special,
    )
    tokenizer.chat_template = template
    return tokenizer


def call_text(family: str, name: str, arguments: str) -> str:
    """Return a call as a model of the family writes it."""
    match family:
        case "mistral":
            return f'[TOOL_CALLS] [{{"name": "{name}", "arguments": {arguments}}}]'
        case "llama":
            return f'<|python_tag|>{{"name": "{name}", "parameters": {arguments}}}'
        case "deepseek":  # its template has opened a thought, in which nothing is a call
            return f'so</think><tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
        case _:
            return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
