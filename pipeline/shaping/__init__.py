"""Reward shaping: small bonuses for form and length while hardly anything succeeds, a component of its own."""
