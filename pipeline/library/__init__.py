"""The parts of the pipeline for a loop of your own: they take plain lists and dictionaries, and no broker."""
