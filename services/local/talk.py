"""How does a console ask the public API, and what does it tell the person?"""

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

UNAUTHENTICATED = 401
UNAVAILABLE = 503
READY_CHECK = "ready-check-"
"""Begins the ids of the launcher's own requests: whoever sees one in a list of traces knows that nobody asked it."""


class Unanswered(Exception):  # noqa: N818 - reads as what happened
    """The suite gave no answer; the text says why in words for the person who asked."""


class KeyNeeded(Unanswered):
    """The suite serves those with an API key."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one streamed answer cost."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_seconds: float
    """From the request to the first token."""
    last_seconds: float
    """From the request to the last token."""
    finish_reason: str

    def summary(self) -> str:
        """Return the one line below an answer."""
        speed = "-"
        if self.completion_tokens > 1 and self.last_seconds > self.first_seconds:
            speed = f"{(self.completion_tokens - 1) / (self.last_seconds - self.first_seconds):.1f}"
        return (
            f"[{self.prompt_tokens} prompt tokens, {self.cached_tokens} cached, "
            f"TTFT {self.first_seconds * 1000:.0f} ms, {speed} tokens/s]"
            + (" (cut off: --max-tokens)" if self.finish_reason == "length" else "")
        )


def first_model(url: str, *, key: str = "", seconds: float = 10.0) -> str:
    """Return the name of the model being served; raise Unanswered when that takes longer than `seconds`."""
    with _client(url, key=key, seconds=seconds) as client, _readable(url):
        reply = client.get("/v1/models")
        _check(reply)
        models = reply.json()["data"]
    if not models:
        raise Unanswered("no model is being served yet: prefill and decode are not both ready (see: fathom status)")
    return str(models[0]["id"])


def one_token(url: str) -> str:
    """Ask for one real token, to know that all eight services work together; return the model's name."""
    model = first_model(url)
    named = {"x-request-id": f"{READY_CHECK}{secrets.token_hex(4)}"}
    with _client(url, seconds=60.0) as client, _readable(url):
        # A token id and not a text: it needs no chat template, and every vocabulary has it.
        body = {"model": model, "prompt": [1], "max_tokens": 1, "temperature": 0}
        _check(client.post("/v1/completions", json=body, headers=named))
    return model


def chat(
    url: str, question: str, *, key: str = "", max_tokens: int, temperature: float, show: Callable[[str], None]
) -> Answer:
    """Stream an answer, handing each piece of text to `show`."""
    body: dict[str, Any] = {
        "model": first_model(url, key=key),
        "messages": [{"role": "user", "content": question}],
        "temperature": temperature,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.monotonic()
    first = last = 0.0
    usage: dict[str, Any] = {}
    finish_reason = ""
    with (
        _client(url, key=key, seconds=120.0) as client,
        _readable(url),
        client.stream("POST", "/v1/chat/completions", json=body) as reply,
    ):
        if reply.is_error:
            reply.read()
        _check(reply)
        for chunk in events(reply.iter_lines()):
            if "error" in chunk:
                raise Unanswered(str(chunk["error"].get("message", chunk["error"])))
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", ()):
                delta = choice.get("delta") or {}
                # A model that reasons may spend all its tokens on that: silence would look like a fault.
                text = delta.get("reasoning_content") or delta.get("content") or ""
                finish_reason = choice.get("finish_reason") or finish_reason
                if text:
                    last = time.monotonic() - started
                    first = first or last
                    show(text)
    if not finish_reason:
        raise Unanswered("the answer broke off before its end (see: fathom logs entrypoint)")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        prompt_tokens=int(usage.get("prompt_tokens", 0)),
        cached_tokens=int(details.get("cached_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens", 0)),
        first_seconds=first,
        last_seconds=last,
        finish_reason=finish_reason,
    )


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON of each server-sent event until [DONE]. Comments and blank lines are skipped."""
    for line in lines:
        field, _, value = line.partition(":")
        if field != "data":
            continue
        if value.strip() == "[DONE]":
            return
        yield json.loads(value)


def _client(url: str, *, key: str = "", seconds: float) -> httpx.Client:
    if not url.startswith(("http://", "https://")):
        raise Unanswered(f"{url} is no address of a suite: it begins with http:// or https://")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    # No proxy from the environment: it could not reach a service on this machine.
    return httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(seconds, connect=5.0), trust_env=False)


def _check(reply: httpx.Response) -> None:
    if not reply.is_error:
        return
    try:
        message = reply.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = reply.text.strip()[:300] or reply.reason_phrase
    if reply.status_code == UNAUTHENTICATED:
        raise KeyNeeded(message)
    advice = "; it may be restarting: try again in a few seconds" if reply.status_code == UNAVAILABLE else ""
    raise Unanswered(f"{message} (HTTP {reply.status_code}){advice}")


@contextlib.contextmanager
def _readable(url: str) -> Iterator[None]:
    """Turn a failed connection into words."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise Unanswered(f"nothing answers at {url}") from error
    except httpx.TimeoutException as error:
        raise Unanswered(f"{url} took too long to answer (see: fathom status)") from error
    except httpx.HTTPError as error:
        raise Unanswered(f"the connection to {url} broke: {error}") from error
