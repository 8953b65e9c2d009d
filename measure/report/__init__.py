"""Reports: tables, CSV, Markdown, pictures and a page."""
