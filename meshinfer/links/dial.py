"""Dialling a node that has several addresses: one after the other, each with a head start; the first greeting wins."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import MutableMapping
from dataclasses import dataclass

import aiohttp

from meshinfer.errors import MeshinferError
from meshinfer.links.greet import GreetingError, greet
from meshinfer.links.link import SOCKET_LIMIT_BYTES
from meshinfer.membership.events import Address
from meshinfer.security.certificates import CertificateError
from meshinfer.wire.messages import Hello

HEAD_START_S = 0.25
"""As RFC 8305 has it for one address before the next."""
DIAL_TIMEOUT_S = 6.0
MAX_ADDRESSES = 16


class DialError(MeshinferError):
    """No address led to a node of this mesh."""


@dataclass(frozen=True, slots=True)
class Dialled:
    """A connection that was greeted."""

    socket: aiohttp.ClientWebSocketResponse
    hello: Hello
    address: Address


async def dial(
    session: aiohttp.ClientSession,
    addresses: tuple[Address, ...],
    mine: Hello,
    failures: MutableMapping[Address, str],
) -> Dialled:
    """Connect to a node at any of its addresses; `failures` is told why the others did not answer. Raises DialError."""
    tries = [
        asyncio.create_task(_try(session, address, mine, place * HEAD_START_S), name=f"dial {address.host}")
        for place, address in enumerate(addresses[:MAX_ADDRESSES])
    ]
    waiting = set(tries)
    winner: Dialled | None = None
    try:
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            while waiting and winner is None:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    result = task.result()
                    if isinstance(result, Dialled) and winner is None:
                        winner = result
                        failures.pop(result.address, None)
                    elif isinstance(result, Dialled):
                        await result.socket.close()
                    else:
                        failures[result[0]] = result[1]
    except TimeoutError:
        pass
    finally:
        for task in tries:
            if not task.done():
                task.cancel()
            elif isinstance(lost := task.result(), Dialled) and lost is not winner:
                await lost.socket.close()
    if winner is None:
        raise DialError("nobody of this mesh answers at " + ", ".join(f"{a.host}:{a.port}" for a in addresses))
    return winner


async def _try(
    session: aiohttp.ClientSession, address: Address, mine: Hello, wait_s: float
) -> Dialled | tuple[Address, str]:
    """One address: a greeted connection, or why not."""
    await asyncio.sleep(wait_s)
    try:
        ws = await session.ws_connect(url(address), max_msg_size=SOCKET_LIMIT_BYTES, compress=0, autoping=True)
        try:
            return Dialled(ws, await greet(ws, mine), address)
        except BaseException:
            await ws.close()
            raise
    except (GreetingError, CertificateError) as error:
        return address, str(error)
    except ssl.SSLCertVerificationError:
        return address, "a node of another mesh"
    except aiohttp.ClientConnectorCertificateError:
        return address, "a node of another mesh (join it with --join)"
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        return address, reason(error)


def reason(error: BaseException) -> str:
    """Why a connection failed, in words."""
    if isinstance(error, TimeoutError):
        return "no answer: is the port open in its firewall?"
    if isinstance(error, ConnectionRefusedError) or isinstance(
        getattr(error, "os_error", None), ConnectionRefusedError
    ):
        return "nobody listens there"
    text = str(error)
    if "certificate required" in text or "unknown ca" in text or "bad certificate" in text or "decrypt error" in text:
        return "it refused this node: another mesh, or another join code"
    return text or type(error).__name__


def url(address: Address) -> str:
    """The URL of a node's links; a scope of IPv6 is percent-encoded as RFC 6874 has it."""
    host = address.host
    if ":" in host:
        host = f"[{host.replace('%', '%25')}]"
    return f"https://{host}:{address.port}/link"
