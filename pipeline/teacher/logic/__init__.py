"""Turns a teacher's answers into columns of a group, and aligns spans across tokenizers. Pure."""
