"""Whether simulation and service say the same: measures a live service, and compares both worlds."""
