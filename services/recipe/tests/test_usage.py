"""Does every request that reached the model leave a record, however it ended and whatever it was spent on?"""

import pytest

from proto.common_pb2 import StreamError
from services.recipe.tests.running import Running
from services.recipe.tests.scripted import Step
from services.recipe.tests.speaking import answering

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASKED = {"messages": [{"role": "user", "content": "hi"}]}


def counted(running: Running, name: str, **labels: str) -> float:
    """A counter of the anonymous tenant."""
    return running.service.metrics.get_sample_value(f"{name}_total", {"tenant": "", "key": "", **labels}) or 0.0


async def test_reasoning_is_counted_apart_and_within_the_output(deep: Running) -> None:
    """As the answer's own usage has it."""
    kinds = ("input", "output", "reasoning")
    before = [counted(deep, "fathom_recipe_usage_tokens", kind=kind) for kind in kinds]
    deep.play(answering("because</think>so"))
    usage = (await deep.post("/v1/chat/completions", {"model": "deep", **ASKED})).json()["usage"]
    after = [counted(deep, "fathom_recipe_usage_tokens", kind=kind) for kind in kinds]

    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < reasoning < usage["completion_tokens"]
    told = [usage["prompt_tokens"], usage["completion_tokens"], reasoning]
    assert told == [b - a for a, b in zip(before, after, strict=True)]


async def test_a_failure_is_recorded_with_what_was_used(recipe: Running) -> None:
    """Tokens that came before it count."""
    before = [
        counted(recipe, "fathom_recipe_usage_requests", outcome="failed"),
        counted(recipe, "fathom_recipe_usage_tokens", kind="output"),
    ]
    lost = StreamError(code=14, kind="PeerLost", message="gone")
    recipe.play(lambda _request: [Step([40, 41]), Step(error=lost)])
    answer = await recipe.post("/v1/chat/completions", {"model": "tiny", **ASKED})
    after = [
        counted(recipe, "fathom_recipe_usage_requests", outcome="failed"),
        counted(recipe, "fathom_recipe_usage_tokens", kind="output"),
    ]

    assert (503, [1, 2]) == (answer.status_code, [b - a for a, b in zip(before, after, strict=True)])
