"""TCP ports for processes that bind them later."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

from tpla.core.errors import ConfigError

_RANGE = (15_000, 32_768)
_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Different TCP ports that nothing is bound to now.

    They lie below those that the kernel gives to outgoing connections: a worker binds its ports a
    minute later, and one of those may be taken by then.

    Raises:
        ConfigError: there are not so many.
    """
    lowest, beyond = _RANGE
    with suppress(OSError, ValueError, IndexError):
        beyond = min(beyond, int(_OUTGOING.read_text().split()[0]))
    candidates = list(range(lowest, beyond))
    random.SystemRandom().shuffle(candidates)
    found: list[int] = []
    with ExitStack() as held:
        for port in candidates:
            if len(found) == count:
                return found
            probe = held.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(port)
    raise ConfigError(
        f"only {len(found)} of {count} TCP ports are free in {lowest}..{beyond - 1}; stop what "
        "holds them, or raise net.ipv4.ip_local_port_range's lower end above that"
    )
