"""World 1: virtual instances and links under a virtual clock, driven by the schedulers that serve live."""
