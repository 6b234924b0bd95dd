"""The report of `lachesis compare`: its tables, and how they become Markdown and HTML."""
