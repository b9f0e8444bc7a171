"""Does the whole service start, describe itself, trace and stop?"""

import asyncio
from functools import partial
from typing import Any

import pytest
from prometheus_client import generate_latest
from pydantic import ValidationError

from kernels.tests.golden_files import tiny_v41
from proto.prefill_pb2 import GetPrefillLoadRequest
from proto.prefill_pb2_grpc import PrefillStub
from services.chassis import telemetry
from services.chassis.testing import OtlpReceiver, running
from services.chassis.window_store import folders
from services.prefill.config import PrefillSettings
from services.prefill.model import card_of, replay_of
from services.prefill.server import build
from services.prefill.states import open_worker
from services.prefill.tests.rig import load, prefill_replica, request
from services.prefill.tests.tiny_model import CONTEXT, EOS, VOCAB


async def test_the_service_starts_serves_and_stops(folder):
    """With a real model: ready, counted in blocks, visible in the metrics."""
    load(folder, 41)  # writes the model
    settings = PrefillSettings(model=folder, dtype="fp32", threads=1, kv_bytes=1 << 20, nats_url="nats://127.0.0.1:1")
    async with running(settings, build) as service:
        assert service.is_ready
        stub: Any = PrefillStub(service.channel(service.address))
        load_now = await stub.GetLoad(GetPrefillLoadRequest(), timeout=30)
        page = generate_latest(service.metrics).decode()

        assert ((1 << 20) // 32768 - 1, 0) == (load_now.total_blocks, load_now.used_blocks)
        assert f"fathom_prefill_free_blocks {float(load_now.total_blocks)}" in page
        assert "fathom_prefill_step_seconds_bucket" in page


def test_the_card_says_what_peers_must_know(folder):
    """Name by the recipe's rule, limits by model and pool."""
    executor = load(folder, 41)
    card = card_of(executor, folder)
    assert ("tiny", CONTEXT, VOCAB, [EOS]) == (
        card.name,
        card.context_tokens,
        card.vocab_tokens,
        list(card.eos_token_ids),
    )
    assert (16, executor.layout.block_bytes, 0) == (card.block_tokens, card.block_bytes, card.window_bytes)
    (folder / "fathom.json").write_text('{"name": "Tiny-1"}', encoding="utf-8")
    assert "Tiny-1" == card_of(executor, folder).name
    (folder / "fathom.json").unlink()
    assert 3 * 16 == card_of(load(folder, 4), folder).context_tokens


@pytest.mark.slow
async def test_the_window_stores_counts_are_in_the_metrics(tmp_path, monkeypatch):
    """Of a model with windows; its states lie in a private folder."""
    monkeypatch.setattr("services.prefill.server.open_worker", partial(open_worker, root=tmp_path))
    settings = PrefillSettings(
        model=tiny_v41(), dtype="fp32", threads=1, kv_bytes=1 << 20, nats_url="nats://127.0.0.1:1"
    )
    async with running(settings, build) as service:
        page = generate_latest(service.metrics).decode()
        assert "fathom_prefill_window_hits_total 0.0" in page
        assert 1 == len(folders(tmp_path))


@pytest.mark.slow
def test_the_card_names_windows_and_images(tmp_path):
    """By the model; the folder may name a replay mode, and a wrong one is refused by name."""
    executor = load(tiny_v41(), 41)
    card = card_of(executor, tiny_v41())
    (tmp_path / "fathom.json").write_text('{"replay": "some"}', encoding="utf-8")

    assert (16, executor.layout.window_bytes, True) == (card.window_tokens, card.window_bytes, card.takes_images)
    assert "off" == replay_of(tiny_v41())
    with pytest.raises(ValueError, match="off, mask, compact"):
        replay_of(tmp_path)


@pytest.mark.parametrize("field", ["model", "dtype", "chunk_tokens"])
def test_bad_settings_are_named(folder, field):
    """A missing model or a value out of range is refused by name."""
    bad = {"model": folder, field: -1} if field != "model" else {}
    with pytest.raises(ValidationError, match=field):
        PrefillSettings(**bad)


async def test_a_request_is_one_trace(folder, tmp_path):
    """prefill.run hangs on the request's traceparent; chunks and handoff hang on prefill.run."""
    async with OtlpReceiver() as receiver, prefill_replica(folder, shm=tmp_path, chunk_tokens=16) as rig:
        telemetry.setup("prefill", "prefill-0", receiver.endpoint)
        parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
        await rig.serve(request("traced", 40, traceparent=f"00-{parent[0]}-{parent[1]}-01"))
        await asyncio.to_thread(telemetry.shutdown)
        spans = [span for span in receiver.spans() if span.trace_id == parent[0]]

    (whole,) = [span for span in spans if span.name == "prefill.run"]
    below = [span.name for span in spans if span.parent_id == whole.span_id]
    assert (parent[1], "traced") == (whole.parent_id, whole.attributes["fathom.request_id"])
    assert [16, 16, 8] == [s.attributes["fathom.chunk_tokens"] for s in spans if s.name == "prefill.chunk"]
    assert {"prefill.chunk", "handoff"} <= set(below)
    (handoff,) = [span for span in spans if span.name == "handoff"]
    assert "shm" == handoff.attributes["fathom.handoff.backend"]


@pytest.mark.parametrize("text", ["{", "[]", '"off"', '{"replay": "maks"}', '{"replay": null}'])
def test_a_folder_that_describes_itself_wrongly_is_refused(tmp_path, text):
    """By the file's name: served without its replay mode, it would answer otherwise than asked."""
    (tmp_path / "fathom.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"fathom\.json"):
        replay_of(tmp_path)
