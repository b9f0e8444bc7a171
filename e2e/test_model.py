"""Does the default model compute what the independent reference computes?"""

import pytest

from e2e.prompts import prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_fp32_logits_equal_transformers(model_dir):
    """Last-token logits of eight prompts agree with transformers on the converted folder within 1e-3."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", reason="the reference is a test dependency")
    from kernels.batch import Batch, Row
    from kernels.executor import Executor

    executor = Executor.load(model_dir, dtype="fp32", num_blocks=16, threads=1)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for prompt in prompts(model_dir)[::3]:
        blocks = list(range(1, 2 + len(prompt.token_ids) // 128))
        ours = executor.logits(
            Batch(rows=(Row(sequence=1, token_ids=prompt.token_ids, position=0, block_table=blocks),))
        )
        with torch.inference_mode():
            theirs = reference(torch.tensor([prompt.token_ids])).logits[0, -1].float()

        assert 1e-3 > float((ours[0] - theirs).abs().max()), prompt.name
        assert int(theirs.argmax()) == int(ours[0].argmax()), prompt.name
