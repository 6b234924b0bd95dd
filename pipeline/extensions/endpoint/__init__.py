"""The recording endpoint: any agent that knows a base URL as an environment."""
