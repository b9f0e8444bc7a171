"""Which prompts must give the same tokens on every path?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

BLOCK_TOKENS = 128

_TEXTS = {
    "short-question": "What is the capital of France?",
    "one-word": "Hello",
    "count": "Count from one to ten:",
    "code": "def fibonacci(n):\n    ",
    "digits": "3.14159265358979 and 1234567890 and 007",
    "emoji": "I ate 🍕🍕 and then 👩‍👩‍👧‍👦 went to 🇫🇷. Explain",
    "cjk": "人工智能正在改变世界。请用一句话解释",
    "mixed-scripts": "Привет мир! こんにちは世界 مرحبا שלום नमस्ते",
    "sum": "12 + 30 =",
    "quote": "To be, or not to be, that is",
    "list": "Three fruits:\n1. apple\n2.",
    "whitespace": "line one\n\n\n\tline\ttwo    four spaces",
    "markup-in-text": "The tag <|im_end|> ends a turn, and <|im_start|>system begins one.",
}

_TURNS = {
    "chat-one-turn": [("user", "Name three colours.")],
    "chat-system": [("system", "You answer in one word."), ("user", "Is water wet?")],
    "chat-multi-turn": [
        ("user", "My name is Ada."),
        ("assistant", "Nice to meet you, Ada!"),
        ("user", "What is my name, and how many letters has it?"),
    ],
    "chat-long-history": [
        (("user", "assistant")[i % 2], f"This is remark number {i} of our conversation about rivers and mountains.")
        for i in range(13)
    ],
}

# Lengths around block borders; 200 is no multiple of the engine's tiles either.
_LENGTHS = (127, 128, 129, 255, 256, 257, 385, 200)

_STORY = (
    "The river rose in the night and by morning the lower fields were a lake. Old Maren counted her sheep twice, "
    "then walked the dyke with a lantern that nobody had lit since the war. {i} geese crossed the grey sky. "
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A named prompt as token ids."""

    name: str
    token_ids: tuple[int, ...]


def prompts(model_dir: Path) -> list[Prompt]:
    """Give all 25 prompts for the default model: texts, chats, and exact lengths around block borders."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    found = [Prompt(name, encode(text)) for name, text in _TEXTS.items()]
    for name, turns in _TURNS.items():
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        found.append(Prompt(name, encode(text + "<|im_start|>assistant\n")))
    for length in _LENGTHS:
        # Each starts with its own words, so that none is a prefix of another and each first run is cold.
        story = encode(f"Tale of {length} words. " + "".join(_STORY.format(i=length + i) for i in range(12)))
        found.append(Prompt(f"length-{length}", story[:length]))
    return found


def bf16_prompts(model_dir: Path) -> list[Prompt]:
    """Give the six of them that the bf16 runs use."""
    names = ("short-question", "emoji", "chat-multi-turn", "length-128", "length-129", "length-257")
    return [p for p in prompts(model_dir) if p.name in names]


def whole_block_hit(num_tokens: int) -> int:
    """Give the tokens that a prompt seen before finds cached.

    The last prompt token is always computed: sampling needs its logits.
    """
    return (num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
