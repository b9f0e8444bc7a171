"""Where do fetched images come from in tests? A TLS server of the tests' own, whose names a false resolver knows."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from services.recipe.image_fetch import Stream

HOST, OTHER = "images.example.com", "cdn.example.com"
PUBLIC, PRIVATE = "93.184.216.34", "10.0.0.7"


@cache
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context, with a certificate for both hosts, and a client's that trusts nothing but it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST), x509.DNSName(OTHER)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = Path(mkdtemp(prefix="fathom-web-")) / "server.pem"
    unlocked = serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, unlocked)
    file.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(file)
    return server, ssl.create_default_context(cafile=str(file))


def ok(body: bytes, *headers: str) -> bytes:
    """An answer with a body."""
    head = "".join(f"{line}\r\n" for line in ("HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers))
    return head.encode() + b"\r\n" + body


def moved(location: str, status: int = 302) -> bytes:
    """A redirect."""
    return f"HTTP/1.1 {status} Moved\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


@dataclass
class Web:
    """The pages, by path, and the names; what was looked up, dialled and asked.

    A page is an answer, or parts of one that are sent 20 ms apart. names: the answers to the lookups of a host, in
    order; the last one stays.
    """

    pages: dict[str, bytes | list[bytes]] = field(default_factory=dict)
    names: dict[str, list[Sequence[str]]] = field(default_factory=lambda: {HOST: [[PUBLIC]], OTHER: [[PUBLIC]]})
    lookups: list[str] = field(default_factory=list)
    dialled: list[tuple[str, int, str]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)
    """Addresses where nobody answers."""
    port: int = 0

    async def resolve(self, host: str, _port: int) -> Sequence[str]:
        self.lookups.append(host)
        answers = self.names.get(host)
        if answers is None:
            raise OSError("no such name")
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def dial(self, address: str, port: int, host: str) -> Stream:
        self.dialled.append((address, port, host))
        if address in self.dead:
            raise ConnectionRefusedError
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=contexts()[1], server_hostname=host)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.asked.append(request)
            page = self.pages.get(request.split(" ")[1], b"HTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\nno")
            for part in page if isinstance(page, list) else [page]:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.02 if isinstance(page, list) else 0)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the other side has had enough
        finally:
            writer.transport.abort() if writer.transport.is_closing() else writer.close()


@asynccontextmanager
async def serving_web(build: Callable[[], Web] = Web) -> AsyncIterator[Web]:
    """Run the server while inside."""
    web = build()
    server = await asyncio.start_server(web.serve, "127.0.0.1", 0, ssl=contexts()[0])
    web.port = server.sockets[0].getsockname()[1]
    try:
        yield web
    finally:
        server.close()
