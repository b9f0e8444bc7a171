"""Promises of Idempotency-Key: one answer however often it is asked for, never another request's."""

import asyncio
from typing import Any

import openai
import pytest

from services.recipe.idempotency import KEEP_SECONDS, AnswerBook, _Copy
from services.recipe.tests.running import Running, Starter
from services.recipe.tests.scripted import Step, saying

IN_SESSION = pytest.mark.asyncio(loop_scope="session")
PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def under(key: str) -> dict[str, str]:
    return {"idempotency-key": key}


def answer_of(body: bytes) -> _Copy:
    """An answer that was sent whole."""
    copy = _Copy()
    copy.see({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    copy.see({"type": "http.response.body", "body": body, "more_body": False})
    return copy


class TestShared:
    pytestmark = IN_SESSION

    async def test_the_same_key_gets_the_same_answer(self, recipe: Running) -> None:
        """Byte for byte, without a second generation, and said so; each response keeps a request id of its own."""
        recipe.play(saying([40, 41], eos=2))
        first, second = [await recipe.post(PATH, CHAT, headers=under("same")) for _ in range(2)]
        other = await recipe.post(PATH, CHAT, headers=under("other"))

        assert (first.content, "true") == (second.content, second.headers["idempotent-replayed"])
        assert "idempotent-replayed" not in first.headers
        assert first.headers["x-request-id"] != second.headers["x-request-id"]
        assert first.json()["id"] != other.json()["id"]
        assert 2 == len(recipe.entrypoint.submitted)

    async def test_another_body_or_a_bad_key_is_refused(self, recipe: Running) -> None:
        """409, and 400; on Messages as Anthropic says it. The same key on another path is another one."""
        recipe.play(saying([40], eos=2))
        await recipe.post(PATH, CHAT, headers=under("body"))
        conflict = await recipe.post(PATH, CHAT | {"n": 2}, headers=under("body"))
        elsewhere = await recipe.post("/v1/completions", {"model": "tiny", "prompt": "hi"}, headers=under("body"))
        message = {"model": "tiny", "messages": CHAT["messages"], "max_tokens": 5}
        said = await recipe.post("/v1/messages", message, headers=under("body"))
        refused = await recipe.post("/v1/messages", message | {"max_tokens": 6}, headers=under("body"))
        bad = [await recipe.post(PATH, CHAT, headers=under(key)) for key in ("", "x" * 256)]

        assert (409, "idempotency_conflict") == (conflict.status_code, conflict.json()["error"]["code"])
        assert [200, 200] == [elsewhere.status_code, said.status_code]
        assert (409, "error") == (refused.status_code, refused.json()["type"])
        assert [400, 400] == [answer.status_code for answer in bad]

    async def test_whoever_comes_meanwhile_waits(self, recipe: Running) -> None:
        """Ten at once are one generation."""
        recipe.play(saying([40] * 5, eos=2, after=0.02))
        answers = await asyncio.gather(*(recipe.post(PATH, CHAT, headers=under("at once")) for _ in range(10)))

        assert 1 == len({answer.content for answer in answers})
        assert 1 == len(recipe.entrypoint.submitted)

    async def test_when_the_first_one_leaves_the_next_one_asks(self, recipe: Running) -> None:
        """Its request was cancelled; the one who waited gets an answer all the same."""
        pauses = iter([30, 0])
        recipe.play(lambda _request: [Step([40], after=next(pauses)), Step([2], finish=1)])
        first, waiting = [asyncio.create_task(recipe.post(PATH, CHAT, headers=under("left"))) for _ in range(2)]
        await recipe.until(lambda: bool(recipe.entrypoint.submitted))
        await asyncio.sleep(0.1)
        first.cancel()
        answer = await waiting

        assert 200 == answer.status_code
        assert [2, 1] == [len(recipe.entrypoint.submitted), len(recipe.entrypoint.cancelled)]

    async def test_errors_are_not_kept(self, recipe: Running) -> None:
        """Next time it may be well."""
        recipe.play(lambda _request: [Step([40], finish=99)])
        failed = await recipe.post(PATH, CHAT | {"model": "gpt-9"}, headers=under("error"))
        recipe.play(saying([40], eos=2))
        again = await recipe.post(PATH, CHAT, headers=under("error"))

        assert [404, 200] == [failed.status_code, again.status_code]

    async def test_streams_are_made_anew(self, recipe: Running) -> None:
        """The key has no effect on them, nor breaks them."""
        recipe.play(saying([40], eos=2))
        for _ in range(2):
            stream = await recipe.sdk.chat.completions.create(
                model="tiny", messages=CHAT["messages"], stream=True, extra_headers=under("stream")
            )
            assert [chunk async for chunk in stream]

        assert 2 == len(recipe.entrypoint.submitted)

    async def test_a_body_is_still_checked(self, recipe: Running) -> None:
        """Too large, no JSON: as without a key."""
        large = await recipe.http.post(PATH, content=b" " * (9 << 20), headers=under("large"))
        broken = await recipe.http.post(PATH, content=b'{"stream"', headers=under("broken"))

        assert [413, 400] == [large.status_code, broken.status_code]


@pytest.mark.slow
async def test_the_official_client_repeats_under_one_key(serving: Starter) -> None:
    """A client that gave up waiting and asks again gets the answer of its first request, if that was finished."""
    async with serving(saying([40], eos=2)) as recipe:
        client: openai.AsyncOpenAI = recipe.sdk
        said = [
            await client.chat.completions.create(model="tiny", messages=CHAT["messages"], extra_headers=under("sdk"))
            for _ in range(2)
        ]

    assert said[0].id == said[1].id


class TestBook:
    def test_memory_is_bounded(self) -> None:
        """The oldest answers go first; one that is too large for all is not kept; what goes is not counted."""
        book = AnswerBook(max_bytes=10_000)
        for i in range(20):
            slot = ("", PATH, str(i))
            book.settle(book.begin(slot, b""), answer_of(b"x" * 2000), now=0.0)
        kept = [i for i in range(20) if book.find(("", PATH, str(i)), now=0.0)]
        book.settle(book.begin(("", PATH, "huge"), b""), answer_of(b"x" * 20_000), now=0.0)

        assert [17, 18, 19] == kept
        assert book.find(("", PATH, "huge"), now=0.0) is None
        assert 0 == book.num_bytes

    def test_answers_age(self) -> None:
        """After an hour a key is new again, and its room free."""
        book, slot = AnswerBook(), ("", PATH, "k")
        book.settle(book.begin(slot, b""), answer_of(b"x"), now=0.0)

        assert book.find(slot, now=KEEP_SECONDS - 1) is not None
        assert book.find(slot, now=KEEP_SECONDS) is None
        assert 0 == book.num_bytes

    def test_half_an_answer_is_none(self) -> None:
        """Cut off, too large, or no JSON: not kept, and whoever waits may go on."""
        book, slot = AnswerBook(), ("", PATH, "k")
        entry = book.begin(slot, b"")
        cut = _Copy()
        cut.see({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        cut.see({"type": "http.response.body", "body": b"{", "more_body": True})
        book.settle(entry, cut, now=0.0)

        assert book.find(slot, now=0.0) is None
        assert entry.settled.is_set()
        assert not answer_of(b"x" * ((2 << 20) + 1)).is_whole
