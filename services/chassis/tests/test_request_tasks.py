"""Which requests run on a replica's shared streams, and what ends them?"""

import asyncio
import time

from proto.common_pb2 import FINISH_REASON_STOP, Cancel, Heartbeat, Request, TokenEvent, TokenFrame
from proto.decode_pb2 import AbortReply, CommitReply, DecodeCommand, DecodeLoad, DecodeSubmit, PushReply, ReserveReply
from proto.decode_pb2_grpc import DecodeServicer, DecodeStub, add_DecodeServicer_to_server
from proto.events_pb2 import LoadReport
from services.chassis import load_reports
from services.chassis.channel import open_channel
from services.chassis.load_reports import report_load
from services.chassis.request_tasks import RequestTasks
from services.chassis.streams import PeerStream
from services.chassis.testing import serve, until


class Waiting(DecodeServicer):
    """Requests that end when told, as a Decode servicer's Run."""

    def __init__(self):
        self.tasks: RequestTasks[TokenEvent, TokenFrame] = RequestTasks(
            lambda events, number: TokenFrame(events=events, sequence=number)
        )
        self.release = asyncio.Event()
        self.ended: list[str] = []

    def Run(self, request_iterator, context):
        return self.tasks.serve(request_iterator, self._take)

    async def Reserve(self, request, context):
        return ReserveReply()

    async def Push(self, request_iterator, context):
        return PushReply()

    async def Commit(self, request, context):
        return CommitReply()

    async def Abort(self, request, context):
        return AbortReply()

    async def GetLoad(self, request, context):
        return DecodeLoad(running_sequences=len(self.tasks))

    def _take(self, command, stream):
        if command.HasField("submit"):
            request_id = command.submit.request.request_id
            stream.start(request_id, self._wait(request_id, stream))
        elif command.HasField("cancel"):
            self.tasks.cancel(command.cancel.request_id, command.cancel.reason)

    async def _wait(self, request_id, stream):
        try:
            await self.release.wait()
            stream.send(TokenEvent(request_id=request_id, token_ids=[1], finish_reason=FINISH_REASON_STOP))
        finally:
            self.ended.append(request_id)


def stream_on(channel) -> PeerStream[DecodeCommand, TokenFrame]:
    return PeerStream(
        DecodeStub(channel).Run,
        lambda: DecodeCommand(heartbeat=Heartbeat()),
        lambda frame: [(event.request_id, event) for event in frame.events],
        "peer",
    )


async def submit(stream, request_id):
    events = await stream.open_request(request_id)
    await stream.send(DecodeCommand(submit=DecodeSubmit(request=Request(request_id=request_id))))
    return events


async def test_requests_end_by_cancel_by_their_stream_or_by_themselves():
    """Each way ends what it should and nothing else; a drain waits, and the last events still arrive."""
    waiting = Waiting()
    async with serve(lambda server: add_DecodeServicer_to_server(waiting, server)) as address:
        channel = open_channel(address)
        one, two = stream_on(channel), stream_on(channel)
        await submit(one, "a")
        await submit(one, "b")
        events = await submit(two, "c")
        await until(lambda: len(waiting.tasks) == 3)

        await one.send(DecodeCommand(cancel=Cancel(request_id="a")))
        await until(lambda: waiting.ended == ["a"])
        await one.close()
        await until(lambda: waiting.ended == ["a", "b"])

        draining = asyncio.create_task(waiting.tasks.drain())
        await asyncio.sleep(0.02)
        assert not draining.done()
        waiting.release.set()
        assert [1] == list((await anext(events)).token_ids)
        await asyncio.wait_for(draining, 30)
        assert waiting.tasks.is_draining
        assert ["a", "b", "c"] == waiting.ended
        await two.close()
        await channel.close()


async def test_load_reports_follow_changes(monkeypatch):
    """Every 200 ms while something changes, else once a second. Here a quarter of both, and late ones are forgiven."""
    assert (0.2, 1.0) == (load_reports.CHANGING_SECONDS, load_reports.QUIET_SECONDS)
    monkeypatch.setattr(load_reports, "CHANGING_SECONDS", 0.05)
    monkeypatch.setattr(load_reports, "QUIET_SECONDS", 0.25)

    async def seconds_for(num_reports, read):
        sent.clear()
        began = time.monotonic()
        reporting = asyncio.create_task(report_load(publish, read))
        await until(lambda: len(sent) >= num_reports)
        reporting.cancel()
        return time.monotonic() - began

    async def publish(report):
        sent.append(report)

    sent: list[LoadReport] = []
    for _ in range(3):  # the best of three: other processes take their share
        changing = await seconds_for(10, lambda: LoadReport(queued_sequences=len(sent)))
        if changing < 9 * 0.25:
            break
    assert 0.44 < changing < 9 * 0.25
    assert 0.24 < await seconds_for(2, LoadReport)
