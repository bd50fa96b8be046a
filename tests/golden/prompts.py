"""Prompts of many kinds, for greedy generation."""

CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)

PROMPTS = [
    CHAT.format("What is the capital of France?"),
    CHAT.format("Write a haiku about the sea."),
    CHAT.format("Explain in two sentences why the sky is blue."),
    CHAT.format("Translate to Spanish: The train leaves at seven in the morning."),
    CHAT.format("List five vegetables, one per line."),
    CHAT.format("What is 17 times 23? Show the steps."),
    CHAT.format("Give me a short recipe for pancakes."),
    CHAT.format("Who wrote Pride and Prejudice, and when?"),
    "Once upon a time, in a village at the edge of the forest, there lived",
    "The three laws of thermodynamics are",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "<html>\n<head>\n<title>Welcome</title>\n",
    '{"name": "Ada", "born": 1815, "known_for": [',
    "Il était une fois, dans un pays lointain,",
    "Die Hauptstadt von Deutschland ist",
    "La fotosíntesis es el proceso mediante el cual",
    "日本の首都は",
    "1, 1, 2, 3, 5, 8, 13, 21, 34,",
    "Q: How many legs does a spider have?\nA: Eight.\nQ: How many legs do two spiders have?\nA:",
    "The stock market fell sharply on Monday after the central bank announced that interest rates would",
    "🙂🙃🙂🙃🙂",
    "Photosynthesis happens in the leaves of plants. Water rises from the roots, carbon dioxide enters through small "
    "openings, and light drives the reaction that turns both into sugar and oxygen. The sugar feeds the plant, and the "
    "oxygen leaves through the same openings. At night, when there is no light, the plant breathes as animals do: it "
    "takes oxygen in and gives carbon dioxide off. A forest therefore changes the air around it in a daily rhythm. In "
    "summary, the main idea of this text is that",
]
