"""A tiny random checkpoint has the published layout, and the same seed makes the same bytes."""

import hashlib
import json

import pytest
import torch

from kernels.batch import SamplingParams
from kernels.executor import Executor
from kernels.generate import GenerateRequest, Generator
from kernels.models.config import ModelNotSupported
from kernels.models.v41.checkpoint import Checkpoint
from kernels.models.v41.config import read_v41_config
from kernels.models.v41.tiny import VISION, write_tiny_model
from kernels.tests.golden_files import tiny_v41

# Two layers less than half the size: a file of 1 MB, written in a moment.
SMALL = {
    "num_hidden_layers": 4, "compress_ratios": [0, 2, 2, 1, 0], "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3], "candidate_source_layer_id": 3, "engram_layer_ids": [1],
    "n_routed_experts": 4, "dspark_n_routed_experts": 4, "num_nextn_predict_layers": 1, "dspark_target_layer_ids": [3],
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> dict[str, str]:
    return {"tokenizer.json": (tiny_v41() / "tokenizer.json").read_text(encoding="utf-8")}


def files(folder) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    made = tmp_path_factory.mktemp("tiny")
    write_tiny_model(made, seed=3, tokenizer=tokenizer)
    return made


@pytest.mark.slow
def test_defaults_are_the_golden_checkpoint_s_sizes(folder) -> None:
    """The same config, derived parts included, and the same tensors: only the numbers differ."""
    config = read_v41_config(folder)
    golden = json.loads((tiny_v41() / "config.json").read_text(encoding="utf-8"))
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))

    assert golden == written | {"transformers_version": golden["transformers_version"]}
    assert read_v41_config(tiny_v41()) == config
    assert Checkpoint(tiny_v41(), config).names == Checkpoint(folder, config).names


@pytest.mark.slow
def test_the_model_answers(folder) -> None:
    """With finite logits, tokens that vary, and neither certainty nor indifference."""
    executor = Executor.load(folder, dtype="fp32", threads=1, num_blocks=16, num_windows=2)
    sampling = SamplingParams(temperature=0.0, num_logprobs=0)
    prompts = [[(7 * start + 31 * place) % 320 for place in range(12 + 20 * start)] for start in (1, 2)]
    answers = Generator(executor).generate([GenerateRequest(prompt, sampling, max_tokens=8) for prompt in prompts])
    logprobs = [logprob for answer in answers for logprob in answer.logprobs if logprob is not None]

    assert ["length", "length"] == [answer.finish for answer in answers]
    assert 6 < len({token for answer in answers for token in answer.token_ids})
    assert 16 == len(logprobs)
    assert -4.5 < sum(logprobs) / 16 < -0.2


@pytest.mark.slow
def test_the_same_seed_makes_the_same_bytes(tmp_path, tokenizer) -> None:
    """In every file; another seed makes other weights, and sharding changes none."""
    for name, seed in {"one": 7, "two": 7, "other": 8}.items():
        write_tiny_model(tmp_path / name, seed=seed, tokenizer=tokenizer, text=SMALL)
    write_tiny_model(tmp_path / "shards", seed=7, tokenizer=tokenizer, text=SMALL, num_shards=3)
    config = read_v41_config(tmp_path / "one")
    one, shards = Checkpoint(tmp_path / "one", config), Checkpoint(tmp_path / "shards", config)

    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert files(tmp_path / "one")["model.safetensors"] != files(tmp_path / "other")["model.safetensors"]
    assert 3 == len(list((tmp_path / "shards").glob("model-0000?-of-00003.safetensors")))
    for name in ("embed.weight", "layers.3.attn.wkv.weight", "mtp.0.ffn.experts.3.w1.weight", "vision.norm.weight"):
        assert torch.equal(one.dense(name), shards.dense(name))


@pytest.mark.slow
def test_sizes_may_be_chosen(tmp_path, tokenizer) -> None:
    """Without a tower, with a larger vocabulary and another picture limit; progress reaches the end."""
    steps: list[tuple[str, int, int]] = []
    text = SMALL | {"vocab_size": 1000, "engram_vocab_size": 500}
    write_tiny_model(
        tmp_path, seed=0, tokenizer=tokenizer, text=text, vision=None, progress=lambda *step: steps.append(step)
    )
    config = read_v41_config(tmp_path)
    checkpoint = Checkpoint(tmp_path, config)

    assert (1000, None) == (config.vocab_size, config.vision)
    assert (1000, 128) == tuple(checkpoint.dense("head.weight").shape)
    assert steps[-1][1] == steps[-1][2] > 0
    assert {"write weights"} == {stage for stage, _, _ in steps}
    assert VISION["max_image_tokens"] == 64


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ({"num_layers": 3}, "text_config has no num_layers"),
        ({"vocab_size": 300}, "the tokenizer has token 319, vocab_size is 300"),
        ({"hidden_size": 100}, "hidden_size 100 is not a multiple of 32"),
    ],
)
def test_sizes_that_cannot_be_are_refused(tmp_path, tokenizer, text, reason) -> None:
    """Before any weight is written."""
    with pytest.raises(ModelNotSupported, match=reason):
        write_tiny_model(tmp_path, seed=0, tokenizer=tokenizer, text=text)

    assert not (tmp_path / "model.safetensors").exists()
    with pytest.raises(ModelNotSupported, match=r"tokenizer\.json"):
        write_tiny_model(tmp_path / "none", seed=0, tokenizer={})
