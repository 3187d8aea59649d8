"""Re-planning: detect traffic shifts, and decide whether to change the numbers of prefill and decode instances."""
