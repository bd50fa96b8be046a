"""Two dozen prompts of many kinds: half to continue, half to answer."""

CONTINUE = [
    "The capital of France is",
    "Once upon a time, in a village at the edge of a great forest, there lived",
    "def fibonacci(n: int) -> int:\n    ",
    "1, 1, 2, 3, 5, 8,",
    "The three laws of thermodynamics state that",
    "Ingredients: flour, sugar, eggs, butter.\nInstructions:",
    "SELECT name, COUNT(*) FROM orders",
    "La Révolution française commença en",
    "Water boils at 100 degrees Celsius because",
    '{"name": "Alice", "age": 30, "city":',
    "To be, or not to be, that is the question:",
    "The stock market fell sharply on Monday after",
]
ASK = [
    "What is the capital of France?",
    "Explain photosynthesis to a ten-year-old.",
    "Write a haiku about the sea.",
    "What is 17 times 23?",
    "Translate 'good morning' into Spanish.",
    "Give me three tips for better sleep.",
    "Who wrote Pride and Prejudice?",
    "Write a Python function that reverses a string.",
    "Summarise the plot of Romeo and Juliet in two sentences.",
    "What are the primary colours?",
    "How do vaccines work?",
    "List five animals that live in Africa.",
]
PASSAGE = (
    "The lighthouse stood on a rock two miles from the shore, and for forty years the same man had kept it. Every "
    "evening he climbed the stairs with a can of oil, trimmed the wick, and wrote the weather in a book. "
)
"""Repeated, it makes a prompt of any length."""
