"""Pure scheduling decisions: no clock, no I/O, no threads. Live service and simulator run the same objects."""
