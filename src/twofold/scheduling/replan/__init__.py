"""Re-planning: detect traffic shifts and decide whether to change the split of instances into prefill and decode."""
