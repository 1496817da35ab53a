"""Raw HTTP requests (RFC 9110, RFC 9112), and the service's answers."""

from typing import NamedTuple

from tests.service.fakes import png

RED = 7
"""Index of the picture's class."""
PNG = png(RED)


class Form(NamedTuple):
    """One row: bytes on a new connection, status of each answer, whether the connection is kept."""

    sent: bytes
    statuses: tuple[int, ...]
    kept: bool


def kept(sent: bytes, *statuses: int) -> Form:
    """Return a form whose connection is kept after the answers."""
    return Form(sent, statuses, kept=True)


def closes(sent: bytes, *statuses: int) -> Form:
    """Return a form whose connection closes after the answers."""
    return Form(sent, statuses, kept=False)


def refused(sent: bytes) -> Form:
    """Return a form that is not a valid request."""
    return closes(sent, 400)


def get(*headers: bytes, line: bytes = b"GET /healthz HTTP/1.1", end: bytes = b"\r\n") -> bytes:
    """Return a request without a body."""
    return end.join([line, b"Host: localhost", *headers, b"", b""])


def post(body: bytes, *headers: bytes, path: bytes = b"/classify") -> bytes:
    """Return a request with a body; its length must be in `headers`."""
    return get(b"Content-Type: image/png", *headers, line=b"POST %b HTTP/1.1" % path) + body


def sized(value: bytes, body: bytes = PNG) -> bytes:
    """Return a request with this value of Content-Length."""
    return post(body, b"Content-Length: " + value)


def chunked(body: bytes, coding: bytes = b"chunked") -> bytes:
    """Return a request with a chunked body, or with invalid chunks."""
    return post(body, b"Transfer-Encoding: " + coding)


def chunk(data: bytes = PNG, size: bytes | None = None) -> bytes:
    """Return one chunk."""
    return (b"%x" % len(data) if size is None else size) + b"\r\n" + data + b"\r\n"


LENGTH = b"%d" % len(PNG)
FITS = b"Content-Length: " + LENGTH
LAST = b"0\r\n\r\n"
GET = get()
POST = sized(LENGTH)

FORMS: dict[str, Form] = {
    "HEAD": kept(get(line=b"HEAD /healthz HTTP/1.1"), 200),
    "POST where only GET is": kept(get(line=b"POST /healthz HTTP/1.1"), 405),
    "OPTIONS of the server": kept(get(line=b"OPTIONS * HTTP/1.1"), 404),
    "unknown method": refused(get(line=b"FETCH /healthz HTTP/1.1")),
    "method in lower case": refused(get(line=b"get /healthz HTTP/1.1")),
    "no method": refused(get(line=b" /healthz HTTP/1.1")),
    "version of another protocol": refused(get(line=b"GET /healthz HTTPS/1.1")),
    "two spaces before the target": kept(get(line=b"GET  /healthz HTTP/1.1"), 200),
    "space in the target": refused(get(line=b"GET /heal thz HTTP/1.1")),
    "an empty line before": kept(b"\r\n" + GET, 200),
    "HTTP/1.0 that stays": kept(
        b"GET /healthz HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" + GET, 200, 200
    ),
    "no colon": refused(get(b"X-A")),
    "no name": refused(get(b": b")),
    "space before the colon": refused(get(b"X-A : b")),
    "space before the colon of a length": refused(post(PNG, b"Content-Length : " + LENGTH)),
    "NUL in the value": refused(get(b"X-A: b\0c")),
    "NUL in the name": refused(get(b"X-\0A: b")),
    "line folded by a space": refused(get(b"X-A: b\r\n c")),
    "length in a folded line": refused(post(PNG, b"X-A: b\r\n " + FITS)),
    "carriage return in the value": refused(get(b"X-A: b\rc")),
    "carriage return as a line's end": refused(get(b"X-A: b\rX-C: d")),
    "line feed as one line's end": refused(get(b"X-A: b\nX-C: d")),
    "line feeds as all lines' ends": refused(get(end=b"\n")),
    "Latin-1 in the value": kept(get("X-A: ä".encode("latin-1")), 200),
    "many headers": kept(get(*(b"X-%d: a" % i for i in range(250))), 200),
    "more headers than are taken": closes(get(*(b"X-%d: a" % i for i in range(300))), 400),
    "long value": kept(get(b"X-A: " + b"a" * 20_000), 200),
    "connection: keep-alive, close": closes(get(b"Connection: keep-alive, close"), 200),
    "connection: close in another line": closes(
        get(b"Connection: keep-alive", b"Connection: close"), 200
    ),
    "underscore": kept(get(b"Content_Length: 5"), 200),
    "same header twice": kept(get(b"X-A: b", b"X-A: c"), 200),
    "length": kept(POST, 200),
    "length with more digits than Python reads": refused(sized(b"0" * 5000 + LENGTH)),
    "length 0": kept(sized(b"0", b""), 422),
    "body with GET": kept(get(b"Content-Length: 3") + b"abc", 200),
    "length with a plus": refused(sized(b"+" + LENGTH)),
    "negative length": refused(sized(b"-" + LENGTH)),
    "hexadecimal length": refused(sized(b"0x%x" % len(PNG))),
    "empty length": refused(sized(b"")),
    "list of one length twice": refused(sized(LENGTH + b", " + LENGTH)),
    "same length in two lines": refused(post(PNG, FITS, FITS)),
    "two lengths": refused(post(PNG, FITS, b"Content-Length: 1")),
    "length of 2^64 and some": refused(sized(b"18446744073709551617")),
    "length above the bound": closes(sized(b"1000000000", b""), 413),
    "no length but a body": closes(post(PNG), 422, 400),
    "a request behind the body": kept(POST + GET, 200, 200),
    "HTTP/1.0 with a length": closes(POST.replace(b"HTTP/1.1", b"HTTP/1.0"), 200),
    "one chunk": kept(chunked(chunk() + LAST), 200),
    "two chunks": kept(chunked(chunk(PNG[:9]) + chunk(PNG[9:]) + LAST), 200),
    "extension": kept(chunked(chunk(size=b"%x;a=b" % len(PNG)) + LAST), 200),
    "size with 0x": refused(chunked(chunk(size=b"0x%x" % len(PNG)) + LAST)),
    "negative size": refused(chunked(chunk(size=b"-1") + LAST)),
    "size of 2^64 and some": refused(chunked(chunk(size=b"1%016x" % len(PNG)) + LAST)),
    "size too small": refused(chunked(chunk(size=b"%x" % (len(PNG) - 1)) + LAST)),
    "size too large by two": refused(chunked(chunk(size=b"%x" % (len(PNG) + 2)) + LAST)),
    "line feed behind the size": refused(chunked(b"%x\n" % len(PNG) + PNG + b"\r\n" + LAST)),
    "nothing behind the data": refused(chunked(b"%x\r\n" % len(PNG) + PNG + LAST)),
    "line feed at the end": refused(chunked(chunk() + b"0\r\n\n")),
    "trailer": kept(chunked(chunk() + b"0\r\nX-A: b\r\n\r\n"), 200),
    "trailer with a length": refused(chunked(chunk() + b"0\r\nContent-Length: 5\r\n\r\n")),
    "a request behind the last chunk": kept(chunked(chunk() + LAST) + GET, 200, 200),
    "chunked twice": refused(chunked(chunk() + LAST, b"chunked, chunked")),
    "chunked in two lines": refused(
        post(chunk() + LAST, b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked")
    ),
    "chunked, then identity": refused(chunked(chunk() + LAST, b"chunked, identity")),
    "identity": refused(post(PNG, b"Transfer-Encoding: identity", FITS)),
    "coding that ends as chunked": refused(chunked(chunk() + LAST, b"xchunked")),
    "vertical tab before the coding": refused(chunked(chunk() + LAST, b"\x0bchunked")),
    "empty coding": refused(chunked(chunk() + LAST, b"")),
    "space before the colon of a coding": refused(
        post(chunk() + LAST, b"Transfer-Encoding : chunked")
    ),
    "coding in a folded line": refused(post(chunk() + LAST, b"Transfer-Encoding:\r\n chunked")),
    "length, then chunked": refused(post(chunk() + LAST, FITS, b"Transfer-Encoding: chunked")),
    "chunked, then length": refused(post(chunk() + LAST, b"Transfer-Encoding: chunked", FITS)),
    "chunked with GET": closes(get(b"Transfer-Encoding: chunked") + chunk() + LAST, 200),
    "two requests": kept(GET + GET, 200, 200),
    "a request behind a close": closes(get(b"Connection: close") + GET, 200),
    "a request behind HTTP/1.0": closes(b"GET /healthz HTTP/1.0\r\n\r\n" + GET, 200),
    "a request behind a refused body": kept(post(PNG, FITS, path=b"/nope") + GET, 404, 200),
    "a request behind what is none": refused(b"\r\nx\r\n\r\n" + GET),
    "what is none behind a request": closes(GET + b"x\r\n\r\n", 200, 400),
    "expect with the body": kept(post(PNG, FITS, b"Expect: 100-continue"), 100, 200),
    "another expectation": Form(post(PNG, FITS, b"Expect: 200-ok"), (417,), kept=False),
    "TLS": refused(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(60))),
    "an answer": refused(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
    "target in absolute form": kept(get(line=b"GET http://localhost:8/healthz HTTP/1.1"), 200),
    "target of another host": kept(get(line=b"GET http://y.example/healthz HTTP/1.1"), 421),
    "target without a path": refused(get(line=b"GET http://x HTTP/1.1")),
    "target of CONNECT": refused(get(line=b"CONNECT x:443 HTTP/1.1")),
    "endless path": refused(get(line=b"GET /%b HTTP/1.1" % (b"a" * 4096))),
    "target with encoded dots": kept(get(line=b"GET /docs/%2e%2e/healthz HTTP/1.1"), 404),
    "target with an encoded line end": kept(get(line=b"GET /healthz%0d%0aX-A:b HTTP/1.1"), 404),
    "target in UTF-8": refused(get(line="GET /hëalthz HTTP/1.1".encode())),
    "two hosts": refused(get(b"Host: y")),
    "no host": refused(b"GET /healthz HTTP/1.1\r\n\r\n"),
    "HTTP/1.0 in chunks": refused(chunked(chunk() + LAST).replace(b"HTTP/1.1", b"HTTP/1.0")),
    "HTTP/2": refused(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "an offer of h2c with a body": kept(
        post(PNG, FITS, b"Connection: upgrade", b"Upgrade: h2c"), 200
    ),
    "an offer of h2c with a body in chunks": kept(
        post(chunk() + LAST, b"Transfer-Encoding: chunked", b"Connection: upgrade", b"Upgrade: h2c")
        + GET,
        200,
        200,
    ),
    "an offer of WebSocket": kept(
        get(b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13"), 200
    ),
    "33 chunks a KiB": kept(
        chunked(b"".join(chunk(PNG[i : i + 31]) for i in range(0, len(PNG), 31)) + LAST), 200
    ),
    "300 chunks of a byte": refused(chunked(300 * chunk(b"x") + LAST)),
    "an extension without end": refused(chunked(b"1;" + b"x" * 1100)),
    "a long extension behind much": refused(chunked(chunk(bytes(100_000)) + b"1;" + b"x" * 1100)),
    "a long trailer behind much": refused(
        chunked(chunk(bytes(100_000)) + b"0\r\nX-A: " + b"b" * 1100)
    ),
    "a trailer without end": refused(chunked(chunk() + b"0\r\nX-A: " + b"b" * 1100)),
    "trailers without end": refused(chunked(chunk() + b"0\r\n" + b"X-A: b\r\n" * 20_000)),
    "headers without end": refused(GET[:-2] + b"X: a\r\n" * 20_000),
    "a header without end": refused(GET[:-2] + b"X: " + b"a" * 200_000),
}
