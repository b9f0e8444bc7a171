"""How do tests make the tiny V4.1 model say something, and know which prompt it was given?"""

from services.recipe.conversation import Conversation, Tool, Turn
from services.recipe.deepseek_renderer import DeepseekRenderer
from services.recipe.deepseek_words import Mark
from services.recipe.tests.deepseek import make_tiny, tiny_vocabulary
from services.recipe.tests.scripted import Script, saying

TINY = make_tiny()
END = tiny_vocabulary().ids[Mark.END]
_RENDERER = DeepseekRenderer(tiny_vocabulary())


def ids_of(text: str) -> list[int]:
    """The ids of a text; control spellings in it are control tokens."""
    return list(TINY.encode(text, add_special_tokens=False).ids)


def answering(text: str, *, per_step: int = 1, eos: int | None = END, after: float = 0.0) -> Script:
    """Returns a script that says the text."""
    return saying(ids_of(text), per_step=per_step, eos=eos, after=after)


def rendered(*turns: Turn, effort: str = "high", tools: tuple[Tool, ...] = ()) -> list[int]:
    """The prompt of a conversation."""
    return _RENDERER.render(Conversation(turns, tools, effort))


def user(text: str) -> Turn:
    return Turn("user", (text,))
