"""`twofold route`: vLLM servers of other operators as workers."""
