"""Says what an answer must match, where a request forces its form or a call of a tool. Pure.

Guarantees that what matches is read as what was forced: a text of the schema, or one call of a tool in the form that is
read whatever the model's family; and that a model whose template has opened a thought ends it first.
"""

from typing import Any

import msgspec

from lachesis.pipeline.extensions.endpoint.logic.conversation import ModelRequest
from lachesis.pipeline.inference.protocol import StructuredOutputs
from lachesis.schemas.errors import DataError

__all__ = ["structured_outputs"]

_CLOSERS = {"<": "</", "[": "[/", "◁": "◁/"}
"""How the marker of a thought begins, and how the one that closes it does."""


def structured_outputs(request: ModelRequest, opened: str) -> StructuredOutputs | None:
    """Return what the answer to a request must match; None: nothing is forced.

    `opened`: the marker by which the prompt opens a thought; "" if none. With an `answer_schema` a call of a tool is an
    answer, too, as agents expect that have both. Raises `DataError` if it is not known how that thought is closed.
    """
    if request.answer_schema is None and not request.forced_tools:
        return None
    calls = [
        _call_format(tool["function"])
        for tool in request.tools
        if not request.forced_tools or tool["function"]["name"] in request.forced_tools
    ]
    schema = None if request.forced_tools else request.answer_schema
    if schema is not None and not calls and not opened:
        return StructuredOutputs(json=schema)
    answers = calls if schema is None else [{"type": "json_schema", "json_schema": schema}, *calls]
    found = answers[0] if len(answers) == 1 else {"type": "or", "elements": answers}
    if opened:
        found = {"type": "sequence", "elements": [*_thought(opened), found]}
    return StructuredOutputs(structural_tag=msgspec.json.encode({"type": "structural_tag", "format": found}).decode())


def _call_format(function: dict[str, Any]) -> dict[str, Any]:
    """Return the form of a call of one function."""
    name = msgspec.json.encode(function["name"]).decode()
    schema = function.get("parameters") or {"type": "object"}
    return {
        "type": "tag",
        "begin": f'<tool_call>\n{{"name": {name}, "arguments": ',
        "content": {"type": "json_schema", "json_schema": schema},
        "end": "}\n</tool_call>",
    }


def _thought(opened: str) -> list[dict[str, Any]]:
    """Return the form of a thought that the prompt has opened, and of the empty lines after it."""
    closer = _CLOSERS.get(opened[0])
    if closer is None or "|" in opened:
        raise DataError(
            f"the chat template opens a thought by {opened!r:.60}, and it is not known how to end it before a forced "
            "answer: leave out response_format and tool_choice, or turn thinking off (chat_template_kwargs of the "
            "environment)"
        )
    thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": closer + opened[1:]}
    return [thought, {"type": "regex", "pattern": "\\n{0,2}"}]
