"""How does a folder's tokenizer.json spell each token? N-gram memory is addressed by what tokens read as."""

from __future__ import annotations

from pathlib import Path

from kernels.models.config import ModelNotSupported
from kernels.models.v41.config_fields import read_json


def token_spellings(tokenizer: Path) -> list[str]:
    """Id -> spelling up to the last token, for kernels.ops.engram.compress_vocabulary; "" for an id without a token.

    tokenizer: path of a tokenizer.json with byte-level BPE.  Added tokens are spelled as they are.
    ModelNotSupported when it cannot be read.
    """
    parsed = read_json(tokenizer)
    try:
        spelling_of: dict[int, str] = {token_id: spelling for spelling, token_id in parsed["model"]["vocab"].items()}
        spelling_of |= {token["id"]: token["content"] for token in parsed.get("added_tokens") or ()}
        return [spelling_of.get(token_id, "") for token_id in range(max(spelling_of) + 1)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelNotSupported(f"{tokenizer} holds no vocabulary: {error!r}") from error
