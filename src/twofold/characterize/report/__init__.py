"""The report of a characterization: tables, charts, Splitwise's insights, and the HTML page."""
