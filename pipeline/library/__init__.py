"""The parts of the pipeline for a loop of your own, on plain lists and dictionaries."""
