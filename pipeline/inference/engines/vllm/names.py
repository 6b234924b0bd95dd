"""Names that this project and its part of vLLM's own process agree on: variables, routes and texts.

On the standard library alone, because vLLM's process imports it too.
"""

__all__ = [
    "CALLERS_PATHS",
    "CONTROL_TOKEN",
    "REFUSED",
    "SAMPLING_KEY",
    "TOKENIZER_HASH",
    "TRANSFER_BACKEND",
    "WEIGHTS_FOLDER",
]

CONTROL_TOKEN = "LACHESIS_VLLM_TOKEN"  # noqa: S105 - a name
"""Environment variable of vLLM's process: the token."""
SAMPLING_KEY = "LACHESIS_VLLM_KEY"
"""Environment variable of vLLM's process: the key; not set if it wants none."""

REFUSED = "weights refused: "
"""How vLLM's workers begin what they say of weights that they did not take."""
TRANSFER_BACKEND = "lachesis"
"""vLLM's weight transfer backend that reads a policy's file (`engines/vllm/worker.py`)."""
WEIGHTS_FOLDER = "LACHESIS_VLLM_WEIGHTS"
"""Environment variable of vLLM's process: the folder that weights may come from."""
TOKENIZER_HASH = "LACHESIS_VLLM_TOKENIZER_HASH"
"""Environment variable of vLLM's process: what it says of its tokenizer."""
CALLERS_PATHS = frozenset(
    {
        "/detokenize",
        "/generate",
        "/inference/v1/generate",
        "/is_paused",
        "/load",
        "/metrics",
        "/ping",
        "/tokenize",
        "/v1/chat/completions",
        "/v1/chat/completions/derender",
        "/v1/chat/completions/render",
        "/v1/completions",
        "/v1/completions/derender",
        "/v1/completions/render",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/responses",
        "/version",
        "/weight_info",
    }
)
"""vLLM's routes that sample, read text or report something, and change nothing. vLLM has a few dozen others, more with
each version; some of them run any method of its workers."""
