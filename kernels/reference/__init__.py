"""The specification of every operation, in plain torch."""
