"""Which URLs may an image be fetched from? Decided by their text alone, before anything is looked up.

The setting names hosts, separated by commas: `images.example.com`, `*.example.com` (any name below it) or `*` (any
name); `:port` after one of them allows that port, else it is 443.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urljoin, urlsplit

MAX_URL_CHARACTERS: Final = 4096
HTTPS_PORT: Final = 443
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
# Two labels at least, the last one not all digits: neither `localhost` nor any spelling of an address.
_HOST: Final = re.compile(rf"(?=.{{1,253}}\Z)(?:{_LABEL}\.)+(?!\d+\Z)(?!0x[0-9a-f]*\Z){_LABEL}")
_RULE: Final = re.compile(rf"(?P<host>\*|(?:\*\.)?(?:{_LABEL}\.)+{_LABEL})(?::(?P<port>[1-9]\d{{0,4}}))?")
_VISIBLE: Final = re.compile(r"[!-~]+")


class UrlRefused(Exception):  # noqa: N818 - named by meaning, like the service errors
    """The URL is not one that images are fetched from. The text is a rule that does not repeat it."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where an image is asked for. path: with its query, as it goes into the request line."""

    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """What the Host header says."""
        return self.host if self.port == HTTPS_PORT else f"{self.host}:{self.port}"

    def redirected(self, location: str) -> str:
        """Return the URL that a redirect's Location means here; raise UrlRefused for one that means none."""
        try:
            return urljoin(f"https://{self.authority}{self.path}", location)
        except ValueError:
            raise UrlRefused("is no URL") from None


@dataclass(frozen=True, slots=True)
class HostRule:
    """Hosts and a port. host: a name, `*.` and the end of names, or `*`."""

    host: str
    port: int

    def allows(self, target: Target) -> bool:
        """Return whether the target is one of these."""
        if target.port != self.port:
            return False
        if self.host == "*":
            return True
        return target.host.endswith(self.host[1:]) if self.host.startswith("*.") else target.host == self.host


def read_rules(setting: str) -> tuple[HostRule, ...]:
    """Return the rules in a setting; raise ValueError for what is none."""
    rules = []
    for part in filter(None, (part.strip().lower() for part in setting.split(","))):
        found = _RULE.fullmatch(part)
        port = int(found["port"] or HTTPS_PORT) if found else 0
        if found is None or port > 65535:
            raise ValueError(
                f"{part!r} is no host: write *, *.example.com, images.example.com or images.example.com:8443"
            )
        rules.append(HostRule(found["host"], port))
    return tuple(rules)


def read_target(url: str, rules: tuple[HostRule, ...]) -> Target:
    """Return where the URL leads; raise UrlRefused for one that the rules do not allow."""
    if len(url) > MAX_URL_CHARACTERS:
        raise UrlRefused(f"must be at most {MAX_URL_CHARACTERS} characters")
    # What URL readers take apart in different ways (spaces, controls, backslashes) is left to none of them.
    if not _VISIBLE.fullmatch(url) or "\\" in url:
        raise UrlRefused("must be an https URL in visible ASCII characters, others as %XX")
    try:
        parts = urlsplit(url)
        port = HTTPS_PORT if parts.port is None else parts.port
    except ValueError:
        raise UrlRefused("is no URL") from None
    if parts.scheme != "https":
        raise UrlRefused("must be a data: or an https: URL")
    if "@" in parts.netloc:
        raise UrlRefused("must not hold a user name or password")
    host = (parts.hostname or "").lower()  # without brackets, if there were any: some of those hold names
    if "[" in parts.netloc or not _HOST.fullmatch(host):
        raise UrlRefused("must name its host by a domain name")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    target = Target(host, port, path)
    if not any(rule.allows(target) for rule in rules):
        raise UrlRefused("names a host or port that images are not fetched from here")
    return target
