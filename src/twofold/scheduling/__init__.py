"""Pure scheduling decisions, without clock, I/O or threads. The live service and the simulator run the same classes."""
