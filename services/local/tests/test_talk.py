"""Is the launcher's own request told apart from those that people make?"""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from services.local.talk import Unanswered, one_token


@pytest.fixture
def asked() -> Iterator[tuple[str, list[str]]]:
    """The address of a model's API, and the x-request-id of each completion that was asked for there."""
    ids: list[str] = []

    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"data": [{"id": "m"}]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            ids.append(self.headers["x-request-id"])
            self._answer({})

        def _answer(self, body: object) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Api) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", ids
        server.shutdown()
        thread.join()


def test_a_ready_check_is_known_by_its_id(asked: tuple[str, list[str]]) -> None:
    """In letters that a recipe takes for an id of its caller's; each its own, so that each has its trace."""
    url, ids = asked
    assert ["m", "m"] == [one_token(url), one_token(url)]

    assert 2 == len(set(ids))
    assert all(re.fullmatch(r"ready-check-[0-9a-f]{8}", one) for one in ids)


def test_what_is_no_address_is_said_to_be_none() -> None:
    """A host and port alone are a frequent slip."""
    with pytest.raises(Unanswered, match="begins with http://"):
        one_token("127.0.0.1:8101")
