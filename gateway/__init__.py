"""The process that clients talk to."""
