"""Generated from protos/pagekeeper/v1; see `make protos`."""
