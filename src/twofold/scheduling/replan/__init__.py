"""Re-planning: detect traffic shifts, and decide whether another prefill/decode split is worth a change of roles."""
