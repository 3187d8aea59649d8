"""What machines, links and models there are, as data: TOML files with a source and a date beside each figure."""
