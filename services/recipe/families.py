"""Which dialect does a model folder ask for?

By its config.json: DeepSeek V4.1 has its own; every other model is spoken to by its chat template. "renderer" in
fathom.json overrides that with one of RENDERERS.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from services.recipe.conversation import Conversation
from services.recipe.deepseek_frame import DeepseekFraming
from services.recipe.deepseek_parser import DeepseekParser
from services.recipe.deepseek_renderer import DeepseekRenderer
from services.recipe.deepseek_words import DEFAULT_EFFORT, Vocabulary, load_vocabulary, missing_marks
from services.recipe.dialect import Dialect, Parser, PlainParser, Renderer
from services.recipe.refusals import ModelFolderError
from services.recipe.template import load_template
from services.recipe.templated import templated
from services.recipe.tokenizer import PromptTokenizer

TEMPLATE, DEEPSEEK, DEEPSEEK_LIBRARY = "chat-template", "deepseek-v4.1", "deepseek-recipe"
RENDERERS = (TEMPLATE, DEEPSEEK, DEEPSEEK_LIBRARY)


def choose_dialect(
    folder: Path,
    config: Mapping[str, Any],
    renderer: object,
    tokenizer_config: Mapping[str, Any],
    tokenizer: PromptTokenizer,
) -> Dialect:
    """Return the dialect of the model in `folder`; raise ModelFolderError for a renderer that cannot be had.

    renderer: what fathom.json says, None when it says nothing.
    """
    if renderer is None:
        renderer = DEEPSEEK if _is_deepseek_v41(config) else TEMPLATE
    if renderer not in RENDERERS:
        raise ModelFolderError(f"{folder / 'fathom.json'}: renderer must be one of {', '.join(RENDERERS)}")
    if renderer == TEMPLATE:
        return templated(tokenizer, load_template(folder, tokenizer_config))
    if missing := missing_marks(tokenizer):
        reason = f"this model's tokenizer lacks {', '.join(missing)}, without which it takes no conversations"
        return Dialect(None, lambda _conversation: PlainParser(tokenizer.pieces), no_chat=reason)
    vocabulary = load_vocabulary(tokenizer)
    if renderer == DEEPSEEK_LIBRARY:
        return _by_library(folder, vocabulary)
    return _deepseek(
        vocabulary,
        DeepseekRenderer(vocabulary),
        lambda conversation: DeepseekParser(
            vocabulary, thinks=conversation.effort != "none", takes_calls=bool(conversation.tools)
        ),
    )


def _by_library(folder: Path, vocabulary: Vocabulary) -> Dialect:
    try:
        from services.recipe import deepseek_library
    except ImportError as exc:
        raise ModelFolderError(
            f"the renderer {DEEPSEEK_LIBRARY} needs the extra: pip install 'fathom[deepseek]'"
        ) from exc
    decoder = deepseek_library.load_tokenizer(folder)
    return _deepseek(
        vocabulary,
        deepseek_library.LibraryRenderer(vocabulary),
        lambda conversation: deepseek_library.LibraryParser(decoder, conversation),
    )


def _deepseek(vocabulary: Vocabulary, renderer: Renderer, parser: Callable[[Conversation], Parser]) -> Dialect:
    return Dialect(
        renderer,
        parser,
        takes_tools=True,
        takes_images=True,
        default_effort=DEFAULT_EFFORT,
        framing=DeepseekFraming(vocabulary),
    )


def _is_deepseek_v41(config: Mapping[str, Any]) -> bool:
    names = [config.get("model_type"), *(config.get("architectures") or ())]
    return any(str(name).lower().replace("_", "").startswith("deepseekv41") for name in names)
