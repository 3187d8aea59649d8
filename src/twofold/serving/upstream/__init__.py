"""Service of the command `twofold route`, which has external vLLM servers as its workers."""
