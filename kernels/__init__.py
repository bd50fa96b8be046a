"""Device work: the KV layout, the list of operations and their implementations."""
