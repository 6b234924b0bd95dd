"""The built-in extensions, one a folder: each ties the pipeline to somebody else's project."""
