"""The operations on torch's fastest CPU paths."""
