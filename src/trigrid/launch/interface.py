"""The network interface over which this node reaches another."""

from __future__ import annotations

import fcntl
import socket
import struct

SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface (netdevice(7))."""
IFREQ = "16s24x"


def interface_to(address: str, port: int) -> str | None:
    """The name of the interface on the way to `address`, or None where it is not found.

    gloo takes the interface of this host's own name instead, which on many machines is the loopback (Debian's
    127.0.1.1), and then tells other nodes to meet it there.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Nothing is sent: the system only chooses the way.
            probe.connect((address, port))
            mine = probe.getsockname()[0]
            found = [name for _, name in socket.if_nameindex() if _address(probe, name) == mine]
    except OSError:
        return None
    # All of 127.0.0.0/8 is the loopback's, whatever address it has.
    return found[0] if found else "lo" if mine.startswith("127.") else None


def _address(probe: socket.socket, name: str) -> str | None:
    try:
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack(IFREQ, name.encode()))
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])
