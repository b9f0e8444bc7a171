"""Does the whole service start, describe itself, trace and stop?"""

import asyncio
from functools import partial
from typing import Any

import pytest
from prometheus_client import generate_latest

from kernels.tests.golden_files import tiny_v41
from proto.decode_pb2 import GetDecodeLoadRequest
from proto.decode_pb2_grpc import DecodeStub
from services.chassis import telemetry
from services.chassis.handoff import SHM_ROOT
from services.chassis.testing import OtlpReceiver, running
from services.chassis.window_store import folders
from services.decode.config import DecodeSettings
from services.decode.model import card_of, replay_of
from services.decode.server import build
from services.decode.states import open_worker
from services.decode.tests.rig import collect, decode_replica, load, request


async def test_the_service_starts_serves_and_stops(folder):
    """With a real model: ready, counted in blocks, visible in the metrics, nothing left in shared memory."""
    load(folder, 41)  # writes the model
    settings = DecodeSettings(model=folder, dtype="fp32", threads=1, kv_bytes=1 << 20, nats_url="nats://127.0.0.1:1")
    async with running(settings, build) as service:
        assert service.is_ready
        shared = SHM_ROOT / f"fathom-{service.boot_id}"
        stub: Any = DecodeStub(service.channel(service.address))
        load_now = await stub.GetLoad(GetDecodeLoadRequest(), timeout=30)
        page = generate_latest(service.metrics).decode()

        assert shared.exists() == SHM_ROOT.exists()
        assert ((1 << 20) // 32768 - 1, 0) == (load_now.total_blocks, load_now.used_blocks)
        assert f"fathom_decode_free_blocks {float(load_now.total_blocks)}" in page
        assert "fathom_decode_preemptions_total 0.0" in page
    assert not shared.exists()


@pytest.mark.slow
async def test_the_window_stores_counts_are_in_the_metrics(tmp_path, monkeypatch):
    """Of a model with windows; its states lie in a private folder."""
    monkeypatch.setattr("services.decode.server.open_worker", partial(open_worker, root=tmp_path))
    settings = DecodeSettings(
        model=tiny_v41(), dtype="fp32", threads=1, kv_bytes=1 << 20, nats_url="nats://127.0.0.1:1"
    )
    async with running(settings, build) as service:
        page = generate_latest(service.metrics).decode()
        assert "fathom_decode_window_hits_total 0.0" in page
        assert 1 == len(folders(tmp_path))


def test_the_card_names_windows_and_images(tmp_path):
    """By the model; the folder may name a replay mode, and a wrong one is refused by name."""
    executor = load(tiny_v41(), 41)
    card = card_of(executor, tiny_v41())
    (tmp_path / "fathom.json").write_text('{"replay": "some"}', encoding="utf-8")

    assert (16, executor.layout.window_bytes, True) == (card.window_tokens, card.window_bytes, card.takes_images)
    assert "off" == replay_of(tiny_v41())
    with pytest.raises(ValueError, match="off, mask, compact"):
        replay_of(tmp_path)


async def test_a_request_is_one_trace(folder):
    """decode.run hangs on the request's traceparent and counts its tokens."""
    async with OtlpReceiver() as receiver, decode_replica(folder) as rig:
        telemetry.setup("decode", "decode-0", receiver.endpoint)
        parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
        wanted = request("traced", 40, traceparent=f"00-{parent[0]}-{parent[1]}-01")
        events = await rig.submit(wanted)
        with telemetry.span("handoff", traceparent=wanted.traceparent):
            await rig.hand_over(wanted)
        await collect(events)
        await rig.idle()
        await asyncio.to_thread(telemetry.shutdown)
        spans = [span for span in receiver.spans() if span.trace_id == parent[0]]

    (whole,) = [span for span in spans if span.name == "decode.run"]
    assert (parent[1], "traced") == (whole.parent_id, whole.attributes["fathom.request_id"])
    assert 8 == whole.attributes["gen_ai.usage.output_tokens"]
    (intake,) = [span for span in spans if span.name == "decode.intake"]
    (commit,) = [span for span in spans if span.span_id == intake.parent_id]
    assert "fathom.v1.Decode/Commit" == commit.name


@pytest.mark.parametrize("text", ["{", "[]", '"off"', '{"replay": "maks"}', '{"replay": null}'])
def test_a_folder_that_describes_itself_wrongly_is_refused(tmp_path, text):
    """By the file's name: served without its replay mode, it would answer otherwise than asked."""
    (tmp_path / "fathom.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"fathom\.json"):
        replay_of(tmp_path)
