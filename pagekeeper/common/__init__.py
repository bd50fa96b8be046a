"""What every process shares: configuration, logging, errors, sockets, plain data of the cache protocol."""
