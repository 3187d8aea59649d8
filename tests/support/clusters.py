"""Cluster files for tests."""

import msgspec


def dump_cluster(spec):
    """Format a cluster as YAML, without unset fields."""
    fields = msgspec.to_builtins(spec)
    for group in (fields, *fields["pools"], *fields["failures"]):
        for key in [key for key, value in group.items() if value is None or value == ()]:
            del group[key]
    return msgspec.yaml.encode(fields).decode()
