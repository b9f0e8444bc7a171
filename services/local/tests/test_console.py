"""Does a person read the right thing?"""

import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from services.local import state
from services.local.commands import app, setting, size
from services.local.guide import IN_ORDER
from services.local.health import Health
from services.local.home import Home
from services.local.logs import Tail, follow, merged
from services.local.plan import Options
from services.local.progress import LineDisplay
from services.local.starting import NotStarted
from services.local.talk import Answer, Unanswered, chat, events, first_model
from services.local.up import _first_token, claim, console_lines, fault, last_words, ready_lines, tail


def health(
    name: str, *, ready: bool = False, stage: str = "loading", done: int = 0, restarts: int = 0, exit_code=None, up=True
) -> Health:
    identity = state.Identity(pid=1, created_unix_seconds=1.0) if up else None
    process = state.ProcessState(
        name=name,
        service=name,
        address="",
        health_url="",
        log="",
        identity=identity,
        restarts=restarts,
        exit_code=exit_code,
    )
    return Health(process, ready=ready, stage=stage, done=done, total=100)


def test_help_names_every_command() -> None:
    """`fathom --help` is enough to get started."""
    text = CliRunner().invoke(app, ["--help"]).output

    for word in ("up", "down", "status", "logs", "chat", "trace", "pull", ".fathom", "fathom up --detach"):
        assert word in text
    listed = re.findall(r"^│ ([a-z-]+) ", text, re.MULTILINE)
    assert ["up", "chat", "status", "logs", "trace", "down", "pull"] == [name for name in listed if name in IN_ORDER][
        :7
    ]


def test_status_shows_the_console_and_waits_for_it_with_nobody(tmp_path: Path, monkeypatch) -> None:
    """One row for each process that `up` shows and `down` stops; ready are those that serve."""
    monkeypatch.chdir(tmp_path)
    home = Home.of(tmp_path)
    home.prepare()
    console = health("console").process.model_copy(
        update={"identity": None, "health_url": "http://127.0.0.1:1/healthz"}
    )
    me = state.Identity.of(os.getpid())
    state.write(home.state, state.SuiteState(supervisor=me, url="http://127.0.0.1:1", model="m", console=console))
    shown = CliRunner().invoke(app, ["status"])

    assert 0 == shown.exit_code
    assert ["console", "console", "-"] == shown.output.splitlines()[1].split()[:3]
    assert "1 processes, 0 ready" in shown.output


@pytest.mark.parametrize("command", [["status"], ["chat", "hello"]])
def test_without_a_suite_the_console_says_what_to_do(command, tmp_path: Path, monkeypatch) -> None:
    """A question into the void is answered with the command that helps."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, command)

    assert 1 == result.exit_code
    assert "nothing is running here: run fathom up" in result.output


def test_down_without_a_suite_is_no_error(tmp_path: Path, monkeypatch) -> None:
    """Stopping what does not run is done already."""
    monkeypatch.chdir(tmp_path)

    assert 0 == CliRunner().invoke(app, ["down"]).exit_code


def test_a_folder_without_a_model_is_refused_at_once(tmp_path: Path, monkeypatch) -> None:
    """--model with the wrong folder fails before anything starts."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["up", "--model", str(tmp_path)])

    assert 1 == result.exit_code
    assert "no config.json" in result.output


def test_a_folder_without_weights_is_refused_at_once(tmp_path: Path, monkeypatch) -> None:
    """Not after seconds, by an engine, in the words of a setting that nobody typed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    refused = CliRunner().invoke(app, ["up", "--model", "."])

    assert 1 == refused.exit_code
    assert "has a config.json and no weights" in refused.output
    assert not (tmp_path / ".fathom").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--dtype", "fp8"], "--dtype: 'fp8' is not one of bf16, fp32, int8"),
        (["--replay", "on"], "--replay: 'on' is not one of off, mask, compact"),
        (["--set", "decode.max_bath=8"], "--set decode.max_bath=8: no such setting"),
        (["--kv-bytes", "8X"], "--kv-bytes"),
        (["--kv-bytes", "9K"], "--kv-bytes (9216 bytes): at least 1M"),
        (["--set", "decode"], "--set"),
    ],
)
def test_a_bad_option_is_refused_before_anything_is_fetched(words, expected, tmp_path: Path, monkeypatch) -> None:
    """The message names the option, and the directory stays as it was."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["up", *words])

    assert result.exit_code in {1, 2}
    assert expected in result.output
    assert "Value error" not in result.output
    assert not list(tmp_path.iterdir())


def test_a_busy_port_is_found_before_the_model_is_fetched(tmp_path: Path, monkeypatch) -> None:
    """Nobody waits for a download only to read that the start was never possible."""
    monkeypatch.chdir(tmp_path)
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        result = CliRunner().invoke(app, ["up", "--port", str(busy.getsockname()[1])])

    assert 1 == result.exit_code
    assert "is in use" in result.output
    assert not (tmp_path / ".fathom" / "models").exists()


def test_the_version_is_told() -> None:
    """What a bug report begins with."""
    assert f"fathom {metadata.version('fathom')}\n" == CliRunner().invoke(app, ["--version"]).output


def test_a_busy_port_and_a_second_suite_are_refused(tmp_path: Path) -> None:
    """Both clashes are told apart, and each says what to do."""
    home = Home.of(tmp_path)
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(NotStarted, match=rf"port {port} is in use by .*pid \d+; choose another one with --port"):
            claim(home, port)


def test_a_second_suite_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    """The owner is named by the message."""
    home = Home.of(tmp_path)
    held = home.lock()
    assert held is not None

    with pytest.raises(NotStarted, match="fathom down"):
        claim(home, 1)


@pytest.mark.parametrize(
    ("text", "expected"), [("1", 1), ("2k", 2048), ("500M", 500 << 20), ("1.5G", 3 << 29), ("8GiB", 8 << 30)]
)
def test_sizes_are_written_as_people_write_them(text: str, expected: int) -> None:
    """Suffixes are powers of 1024."""
    assert expected == size(text)


@pytest.mark.parametrize("text", ["", "G", "-1", "8X"])
def test_other_sizes_are_refused(text: str) -> None:
    """The message shows a right one."""
    with pytest.raises(typer.BadParameter, match="500M or 8G"):
        size(text)


def test_a_setting_has_three_parts() -> None:
    """SERVICE.SETTING=VALUE, where the value may hold anything."""
    assert ("prefill", "chunk_tokens", "a=b.c") == setting("prefill.CHUNK_TOKENS=a=b.c")
    with pytest.raises(typer.BadParameter):
        setting("prefill=1")


def test_a_pasted_curl_holds_valid_json() -> None:
    """What we print can be run."""
    curl = ready_lines("http://127.0.0.1:8000", "m", 1.0).splitlines()[2]

    assert "http://127.0.0.1:8000/docs" in ready_lines("http://127.0.0.1:8000", "m", 1.0)
    assert "through them: http://c:1\n" in ready_lines("http://127.0.0.1:8000", "m", 1.0, console_url="http://c:1")
    question = json.loads(curl.split("'")[3])
    assert ("m", 0, 100) == (question["model"], question["temperature"], question["max_tokens"])


def test_bad_settings_fail_at_once_and_crashes_at_the_third() -> None:
    """A first crash may be bad luck; a wrong setting never is."""
    assert fault([health("a"), health("b", ready=True)]) is None
    assert fault([health("a", exit_code=-9, restarts=1)]) is None
    assert fault([health("a", exit_code=1, restarts=2, up=False)]) is not None
    assert fault([health("a", exit_code=78, up=False)]) is not None


def test_plain_progress_says_each_change_once(capsys) -> None:
    """A log of `fathom up` stays short."""
    lines = LineDisplay()
    for done in (0, 1, 2, 30, 31, 80):
        lines.services([health("decode-0", done=done)])
    lines.services([health("decode-0", ready=True, stage="ready")])

    said = capsys.readouterr().out.splitlines()
    assert ["decode-0: loading 0%", "decode-0: loading 30%", "decode-0: loading 80%", "decode-0: ready"] == said


def test_a_restart_is_said_and_chatter_is_not() -> None:
    """Of the supervisor's log a person hears the ends."""
    ended = {"event": "launcher.service.ended", "process": "decode-0", "exit_code": -9, "restart_in_seconds": 0.5}
    said = list(console_lines(["Traceback", json.dumps(ended), json.dumps({"event": "launcher.service.started"})]))

    assert 1 == len(said)
    assert "decode-0 ended with status -9" in said[0]


def test_logs_are_merged_by_time_and_tracebacks_stay_together() -> None:
    """Lines without a time follow the line they belong to."""
    first = ['{"timestamp": "2026-01-01T00:00:01"}', "  traceback", '{"timestamp": "2026-01-01T00:00:03"}']
    second = ['{"timestamp": "2026-01-01T00:00:02"}']

    assert [("a", first[0]), ("a", first[1]), ("b", second[0]), ("a", first[2])] == merged(
        [("a", first), ("b", second)]
    )


def test_a_log_is_read_in_whole_lines_across_a_new_run(tmp_path: Path) -> None:
    """A half-written line waits, and a shorter file is a new one."""
    log = tmp_path / "x.log"
    reader = Tail(log)
    log.write_text("one\ntw")
    assert ["one"] == reader.read()
    log.write_text("one\ntwo\n")
    assert ["two"] == reader.read()
    log.write_text("new\n")
    assert ["new"] == reader.read()


def test_logs_of_one_service_are_those_of_its_replicas(tmp_path: Path) -> None:
    """`fathom logs prefill` shows prefill-0, and not prefill_lb."""
    home = Home.of(tmp_path)
    home.prepare()
    for name in ("prefill-0", "prefill_lb", "decode-0"):
        home.log(name).write_text(f"{name} speaks\n")

    assert ["prefill-0 | prefill-0 speaks"] == list(follow(home, "prefill", num_lines=9))
    assert 3 == len(list(follow(home, None, num_lines=9)))
    assert [] == list(follow(home, None, num_lines=0))


def test_logs_of_a_suite_that_ended_are_shown_and_end(tmp_path: Path, monkeypatch) -> None:
    """Nobody waits for what nobody will write."""
    monkeypatch.chdir(tmp_path)
    home = Home.of(tmp_path)
    home.prepare()
    home.log("decode-0").write_text("last words\n")
    shown = CliRunner().invoke(app, ["logs", "-f"])

    assert (0, "decode-0 | last words\n") == (shown.exit_code, shown.stdout)
    assert "that is all that was written" in shown.stderr


def test_logs_are_followed_until_the_end_and_to_the_last_line(tmp_path: Path) -> None:
    """What was written just before the suite ended is not lost."""
    home = Home.of(tmp_path)
    home.prepare()
    log = home.log("decode-0")
    log.write_text("one\n")

    def is_written() -> bool:
        with log.open("a") as file:
            file.write("more\n")
        return log.read_text().count("more") < 2

    lines = list(follow(home, None, num_lines=9, is_written=is_written))
    assert ["decode-0 | one", "decode-0 | more", "decode-0 | more"] == lines


def test_refused_settings_are_told_without_the_table_of_all_settings(tmp_path: Path) -> None:
    """Of what exit 78 prints, a person first needs the problems."""
    log = tmp_path / "decode-0.log"
    log.write_text(
        "old\ndecode: bad settings\n  FATHOM_DECODE_MAX_BATCH: no number\nallowed:\n  FATHOM_DECODE_LISTEN\n"
    )
    bad = health("decode", exit_code=78, up=False).process.model_copy(update={"log": str(log)})

    assert "FATHOM_DECODE_MAX_BATCH: no number" in last_words(bad)
    assert "FATHOM_DECODE_LISTEN" not in last_words(bad)


def test_a_missing_log_has_a_readable_tail(tmp_path: Path) -> None:
    """The reason of a failed start never fails itself."""
    assert "    (its log is empty)" == tail(tmp_path / "none.log")


def test_server_sent_events_end_at_done() -> None:
    """Comments, blank lines and what follows [DONE] are no events."""
    assert [{"a": 1}] == list(events(iter([": hello", "", 'data: {"a": 1}', "data: [DONE]", 'data: {"b": 2}'])))


def test_the_summary_line_names_the_four_figures() -> None:
    """Prompt tokens, cached tokens, time to first token, speed."""
    answer = Answer(40, 0, 11, first_seconds=0.25, last_seconds=1.25, finish_reason="stop")

    assert "[40 prompt tokens, 0 cached, TTFT 250 ms, 10.0 tokens/s]" == answer.summary()


def test_nobody_at_the_address_is_said_in_words() -> None:
    """A refused connection is no traceback."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(Unanswered, match="nothing answers at"):
        chat(f"http://127.0.0.1:{port}", "hello", max_tokens=1, temperature=0, show=print)


def test_options_survive_the_way_to_the_supervisor() -> None:
    """The supervisor reads exactly what `up` was told."""
    options = Options(model=Path("/m"), settings=(("decode", "max_batch", "8"),))

    assert options == Options.model_validate_json(options.model_dump_json())


@pytest.fixture
def guarded() -> Iterator[str]:
    """The address of a suite that serves holders of the key `sk-right` alone."""

    class Guard(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.headers["authorization"] == "Bearer sk-right"
            body = {"data": [{"id": "m"}]} if is_known else {"error": {"message": "an API key is needed"}}
            self.send_response(200 if is_known else 401)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Guard) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_suite_that_asks_for_keys_is_ready_too(guarded: str) -> None:
    """The launcher has no key and needs none; whoever has one gives it to `chat`."""
    assert "" == _first_token(guarded)
    assert "--key" in ready_lines(guarded, "", 1.0)
    assert "m" == first_model(guarded, key="sk-right")
    refused = CliRunner().invoke(app, ["chat", "hi", "--url", guarded, "--key", "sk-wrong"])
    assert (1, True) == (refused.exit_code, "an API key is needed" in refused.output)
    without = CliRunner().invoke(app, ["chat", "hi", "--url", guarded])
    assert (1, True) == (without.exit_code, "an API key is needed: fathom chat --key sk-..." in without.output)
