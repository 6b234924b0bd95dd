"""Curriculum: which items the environments draw, learned from the outcomes of every group."""
