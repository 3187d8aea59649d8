"""Tool calls and reasoning in chat answers."""
