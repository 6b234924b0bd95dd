"""Reads answers out of completions, and compares them: numbers, mathematics, words, programs."""
