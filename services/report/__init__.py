"""The report of a comparison: tables, Markdown, and a page that needs nothing but itself."""
