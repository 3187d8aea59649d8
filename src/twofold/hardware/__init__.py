"""Hardware catalog: accelerators, machines, links, storage tiers and models."""
