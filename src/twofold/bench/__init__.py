"""A load generator for any OpenAI endpoint."""
