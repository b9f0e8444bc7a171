"""Which network addresses are a stranger's to name? Public ones: what answers there answers everybody.

An allow-list at heart: of IPv6 only the one range that is given out for use, less what is carved out of it for other
ends; of IPv4 all that IANA's registry of special addresses does not name. Addresses that hold others (mapped,
translated, tunnelled) lie outside, so nothing need be unwrapped.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final

_SPECIAL_4: Final = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",  # this host
            "10.0.0.0/8",  # private
            "100.64.0.0/10",  # behind a provider's translator; some clouds' metadata
            "127.0.0.0/8",  # loopback
            "168.63.129.16/32",  # a cloud's own agent, public by its number alone
            "169.254.0.0/16",  # link-local; most clouds' metadata
            "172.16.0.0/12",  # private
            "192.0.0.0/24",  # protocol assignments
            "192.0.2.0/24",  # documentation
            "192.31.196.0/24",  # AS112
            "192.52.193.0/24",  # multicast tunnels
            "192.88.99.0/24",  # 6to4 relays
            "192.168.0.0/16",  # private
            "192.175.48.0/24",  # AS112
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved; broadcast
        ),
    )
)
_UNICAST_6: Final = IPv6Network("2000::/3")
_SPECIAL_6: Final = tuple(
    map(
        IPv6Network,
        (
            "2001::/23",  # protocol assignments, Teredo and ORCHID among them
            "2001:db8::/32",  # documentation
            "2002::/16",  # 6to4: an IPv4 address inside
            "2620:4f:8000::/48",  # AS112
            "3fff::/20",  # documentation
        ),
    )
)


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether a server may be asked at this address on a stranger's word."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _SPECIAL_4)
    if address.scope_id is not None or address not in _UNICAST_6:
        return False
    return not any(address in network for network in _SPECIAL_6)
