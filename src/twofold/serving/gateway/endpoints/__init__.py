"""Endpoints of the API: completions, chat, Anthropic's messages, and tokens."""
