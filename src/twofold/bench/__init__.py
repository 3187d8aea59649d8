"""A load generator for any OpenAI endpoint, and what committed benches share."""
