"""The HTTP routes of an inference server, over any engine that samples tokens."""
