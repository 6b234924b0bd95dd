"""Real vLLM: a child process of the service, and the code of ours that runs inside it."""
