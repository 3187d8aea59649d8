"""The command line: `twofold COMMAND`."""
