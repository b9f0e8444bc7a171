"""Which model do the recipe's tests speak for? A byte-level BPE of about 300 tokens with a ChatML template."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] | trim) + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "Count from one to ten, please. The end of the beginning is not the beginning of the end. 12345 hello world"
] * 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE of about 320 tokens: specials, all bytes, a few merges, and <think> as an added, not special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in ("<think>", "</think>")])
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that is there."""
    id_ = tokenizer.token_to_id(token)
    assert id_ is not None
    return int(id_)
