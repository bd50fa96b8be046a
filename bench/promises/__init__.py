"""The promises, by what they are about. Each module lists its own in PROMISES."""
