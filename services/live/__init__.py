"""How a run stands: what `status`, `top`, `trace` and the demo show, folded from heartbeats and the streams."""
