"""Notices of what stands in the way of a run or harms it."""
