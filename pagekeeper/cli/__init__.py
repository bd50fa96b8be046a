"""The pagekeeper command."""
