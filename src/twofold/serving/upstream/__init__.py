"""Service of the command `twofold route`: vLLM servers of other operators are its workers."""
