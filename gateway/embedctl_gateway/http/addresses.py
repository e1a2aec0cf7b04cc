"""Which addresses belong to the public network, and which to somebody's own."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from embedctl_config.errors import SettingsError

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

#: Kept for protocols, examples and tunnels. Which of them Python calls public depends on its release.
_SPECIAL = [
    ip_network(each)
    for each in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
]
_PUBLIC_OF_IPV6 = IPv6Network("2000::/3")
#: An IPv4 address as a network writes it that has IPv6 alone.
_NAT64 = IPv6Network("64:ff9b::/96")


def address_in(text: str) -> Address:
    """The address that a text says; of an IPv4 address that is written as one of IPv6, the IPv4 address. Raises
    ValueError if it says none."""
    found = ip_address(text)
    if isinstance(found, IPv4Address):
        return found
    return found.ipv4_mapped or (IPv4Address(int(found) & 0xFFFFFFFF) if found in _NAT64 else found)


def is_public(address: Address) -> bool:
    """Whether an address is one host's of the public network: not private, loopback, link-local, multicast, or kept for
    another purpose."""
    if not address.is_global or address.is_multicast or any(address in network for network in _SPECIAL):
        return False
    return address.version == 4 or address in _PUBLIC_OF_IPV6


def networks_of(text: str, setting: str) -> tuple[Network, ...]:
    """The networks that a setting names, with commas between them; raises SettingsError if one is none."""
    try:
        return tuple(ip_network(each.strip()) for each in text.split(",") if each.strip())
    except ValueError as error:
        raise SettingsError(f"{setting}: {error}. Write networks such as 10.1.0.0/16, with commas") from None
