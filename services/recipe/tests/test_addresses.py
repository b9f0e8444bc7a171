"""Promises about addresses: whatever is not public is found out, in whatever it is wrapped."""

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.recipe.addresses import is_public

FOURS = st.integers(0, (1 << 32) - 1).map(IPv4Address) | st.sampled_from(
    ["10.0.0.1", "127.0.0.1", "169.254.169.254", "192.168.1.1", "172.16.0.1", "100.100.100.200", "8.8.8.8"]
).map(IPv4Address)
SIXES = st.integers(0, (1 << 128) - 1).map(IPv6Address) | st.integers(0, (1 << 125) - 1).map(
    lambda low: IPv6Address((1 << 125) | low)
)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0", "10.1.2.3", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.254", "168.63.129.16",
        "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.192", "192.88.99.1", "192.168.0.1", "198.18.0.1",
        "203.0.113.9", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255", "::", "::1", "::8.8.8.8",
        "::ffff:8.8.8.8", "::ffff:127.0.0.1", "64:ff9b::8.8.8.8", "64:ff9b:1::1", "100::1", "2001::1", "2001:db8::1",
        "2001:10::1", "2001:20::1", "2002:7f00:1::1", "2002:808:808::1", "3fff::1", "5f00::1", "fc00::1",
        "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "2606:4700::1%eth0", "fec0::1", "ff02::1",
    ],
)  # fmt: skip
def test_special_addresses_are_not_public(address: str) -> None:
    """Private, loopback, link-local, multicast, reserved, unique-local, and IPv4 inside of IPv6."""
    assert not is_public(ip_address(address))


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "8.8.8.8", "93.184.216.34", "172.32.0.1", "2606:4700:4700::1111", "2a00:1450::1"]
)
def test_the_others_are(address: str) -> None:
    """Or nothing could be fetched."""
    assert is_public(ip_address(address))


@settings(max_examples=100, deadline=None)
@given(FOURS | SIXES)
def test_public_means_global_to_the_standard_library(address: IPv4Address | IPv6Address) -> None:
    """Never more than its registry says, though it says it in other words."""
    if is_public(address):
        assert address.is_global
        assert not any((address.is_multicast, address.is_private, address.is_reserved, address.is_loopback))


@settings(max_examples=100, deadline=None)
@given(FOURS, st.integers(0, (1 << 80) - 1))
def test_no_ipv4_address_hides_in_an_ipv6_one(inner: IPv4Address, rest: int) -> None:
    """Mapped, compatible, translated, 6to4 and Teredo."""
    number = int(inner)
    for outer in (
        (0xFFFF << 32) | number,
        number,
        (0x64FF9B << 96) | number,
        (0x2002 << 112) | (number << 80) | rest,
        (0x20010000 << 96) | ((rest >> 16) << 32) | (number ^ 0xFFFFFFFF),
    ):
        assert not is_public(IPv6Address(outer))
