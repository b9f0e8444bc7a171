"""Which page shows the API's description? One file of ours, that asks nobody but this server.

Its style and its script stand in it and are named by their digests in a Content-Security-Policy, so nothing else can
run in the page, whatever the description holds.
"""

import base64
import hashlib
import re
from pathlib import Path

_FILE = Path(__file__).with_name("docs_page.html")
_STYLE, _SCRIPT = re.compile(r"<style>(.*?)</style>", re.DOTALL), re.compile(r"<script>(.*?)</script>", re.DOTALL)


def page_with_headers() -> tuple[bytes, dict[str, str]]:
    """Return the page, and the headers that it is served with."""
    text = _FILE.read_text(encoding="utf-8")
    policy = (
        "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        f"style-src {_digest(_STYLE, text)}; script-src {_digest(_SCRIPT, text)}"
    )
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    return text.encode(), headers


def _digest(part: re.Pattern[str], text: str) -> str:
    found = part.search(text)
    assert found is not None, "the page has one of each"
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"
