"""Training at Tinker by its own SDK, and the policy served at /v1. No torch."""
