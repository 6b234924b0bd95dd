"""Reference inference: an engine over transformers, an HTTP server with vLLM's fields, a client."""
