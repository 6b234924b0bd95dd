"""Environments of Atropos: those that publish over HTTP, and classes that the run itself drives.

Imports nothing: a process of an environment that takes `CurriculumMixin` from here has Atropos' packages and not ours.
"""
