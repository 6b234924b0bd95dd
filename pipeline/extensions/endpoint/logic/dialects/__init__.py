"""The three protocols in which agents request answers of a model."""

from collections.abc import Mapping

from lachesis.pipeline.extensions.endpoint.logic.dialects.anthropic import AnthropicMessages
from lachesis.pipeline.extensions.endpoint.logic.dialects.chat import OpenAiChat
from lachesis.pipeline.extensions.endpoint.logic.dialects.dialect import Dialect
from lachesis.pipeline.extensions.endpoint.logic.dialects.responses import OpenAiResponses

__all__ = ["DIALECTS"]

DIALECTS: Mapping[str, Dialect] = {one.path: one for one in (OpenAiChat(), OpenAiResponses(), AnthropicMessages())}
"""By the path at which each of them is requested."""
