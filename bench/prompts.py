"""A text of which a prompt of any length can be made."""

PASSAGE = (
    "The lighthouse stood on a rock two miles from the shore, and for forty years the same man had kept it. Every "
    "evening he climbed the stairs with a can of oil, trimmed the wick, and wrote the weather in a book. "
)
