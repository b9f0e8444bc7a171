"""The model computes what its definition says."""

import json

import pytest
import torch

from kernels.batch import Batch, Row
from kernels.executor import Executor
from kernels.models.weights import BadWeights
from kernels.tests.tiny_models import FAMILIES, plain_forward, write_tiny

IDS = [(index * 37 + 11) % 320 for index in range(150)]


def last_logits(executor, ids):
    table = range(1, 2 + len(ids) // executor.layout.block_tokens)
    return executor.logits(Batch((Row(0, ids, 0, table),)))[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_a_plain_forward(family, tmp_path) -> None:
    """Each family's fp32 logits are those of a forward written straight from the definition."""
    folder = write_tiny(family, tmp_path)
    executor = Executor.load(folder, dtype="fp32", threads=1, num_blocks=20, block_tokens=16)

    expected = plain_forward(folder, IDS)
    for count in (1, 17, 150):
        torch.testing.assert_close(expected[count - 1], last_logits(executor, IDS[:count]), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 0.1), ("int8", 0.3)])
def test_narrow_settings_stay_near_the_plain_forward(dtype, tolerance, tmp_path) -> None:
    """bf16 and int8 are roundings of the same model, not another one: logits (of order 1) move little."""
    folder = write_tiny("llama", tmp_path, dtype=torch.bfloat16)
    executor = Executor.load(folder, dtype=dtype, threads=1, num_blocks=20)

    torch.testing.assert_close(plain_forward(folder, IDS)[-1], last_logits(executor, IDS), atol=tolerance, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family, tmp_path) -> None:
    """An independent implementation agrees, through the same folder."""
    transformers = pytest.importorskip("transformers")
    folder = write_tiny(family, tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    executor = Executor.load(folder, dtype="fp32", threads=1, num_blocks=20)

    with torch.no_grad():
        expected = reference(torch.tensor([IDS])).logits[0, -1]
    torch.testing.assert_close(expected, last_logits(executor, IDS), atol=1e-4, rtol=0)


def test_every_wrong_tensor_is_named_at_once(tmp_path) -> None:
    """Missing, unknown and mis-shaped tensors come in one error."""
    folder = write_tiny("mistral", tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(raw | {"num_hidden_layers": 1, "intermediate_size": 80, "architectures": ["Qwen2ForCausalLM"]})
    )

    with pytest.raises(BadWeights) as caught:
        Executor.load(folder, dtype="fp32", threads=1, num_blocks=20)
    text = str(caught.value)
    assert "model.layers.0.self_attn.q_proj.bias is missing" in text
    assert "model.layers.0.mlp.down_proj.weight has shape [96, 160], the config asks for [96, 80]" in text
    assert "model.layers.1.mlp.down_proj.weight is not part of" in text
