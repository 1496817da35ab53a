"""GET / and GET /docs: pages with a strict policy, the files that they load, and /openapi.json.

Extensions add files to the page. The page's document lists the explanation methods. Pages load
files from this host only. Browsers revalidate each file on every visit, and get 304 while it is
unchanged.
"""

import gzip
import hashlib
import html
import re
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from model.errors import ExtensionError
from model.methods import methods
from service.extension import extensions
from service.web.middleware import request_context
from service.web.routes.endpoint import Router
from vitserve import __version__

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_MEDIA_TYPES: Final = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".jpg": "image/jpeg",
    ".svg": "image/svg+xml",
}

_PAGE: Final = Path(__file__).parents[1] / "page"
_STATIC: Final = Path(__file__).parents[1] / "static"
_INDEX: Final = _PAGE / "index.html"


def extension_folders() -> dict[str, Path]:
    """Return the folder of each extension's part of the page; raises `ExtensionError`."""
    folders: dict[str, Path] = {}
    for extension in extensions():
        if extension.page is None:
            continue
        folder = Path(extension.page)
        for name in ("main.js", "main.css"):
            if not (folder / name).is_file():
                raise ExtensionError(
                    f"the extension {extension.name!r}: {folder / name} of its `page` is missing"
                )
        folders[extension.name] = folder
    return folders


_EXTENSION_FOLDERS: Final = extension_folders()


def _page_files(folder: Path, path: str) -> dict[str, Path]:
    """Return the files that the page loads from a folder, by their paths below `path`."""
    return {
        f"{path}/{file.relative_to(folder).as_posix()}": file
        for file in sorted(folder.rglob("*"))
        if file.suffix in _MEDIA_TYPES and file != _INDEX
    }


_FILES: Final = {
    "/": _INDEX,
    "/docs": _STATIC / "docs/index.html",
    "/docs/docs.js": _STATIC / "docs/docs.js",
    "/docs/swagger-ui-bundle.js": _STATIC / "swagger_ui/swagger-ui-bundle.js.gz",
    "/docs/swagger-ui.css": _STATIC / "swagger_ui/swagger-ui.css.gz",
    **_page_files(_PAGE, "/page"),
}
for _name, _folder in _EXTENSION_FOLDERS.items():
    _FILES.update(_page_files(_folder, f"/page/{_name}"))

_ACCEPTS_GZIP: Final = r"gzip(?!\s*;\s*q=0(\.0*)?\s*(,|$))"

PUBLIC: Final = frozenset({"/openapi.json", *_FILES})
"""Paths that never require an API key: the page asks for it."""

router = Router(is_described=False, is_loose=True)


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """Describe the service for machines."""
    prefix = request_context(request.scope).prefix
    document: bytes = request.app.openapi(__version__)
    if prefix:
        servers = msgspec.json.encode({"servers": [{"url": prefix}]})
        document = b"%b,%b" % (servers[:-1], document[1:])
    return Response(document, media_type="application/json")


async def file(request: Request) -> Response:
    """Return a file of the page or of the documentation, compressed if it is stored so."""
    path = _FILES[request.scope["path"]]
    is_compressed = path.suffix == ".gz"
    name = path.with_suffix("") if is_compressed else path
    media_type = _MEDIA_TYPES[name.suffix]
    accepted = request.headers.get("accept-encoding", "")
    decompress = is_compressed and not re.search(_ACCEPTS_GZIP, accepted, re.IGNORECASE)
    content, tag = _content(path, decompress)
    headers = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff", "ETag": tag}
    if media_type == "text/html":
        headers |= {"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer"}
    if is_compressed:
        headers["Vary"] = "Accept-Encoding"
        if not decompress:
            headers["Content-Encoding"] = "gzip"
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=media_type)


@lru_cache
def _content(path: Path, decompress: bool) -> tuple[bytes, str]:
    """Return a file's content, decompressed on demand, and its ETag, a quoted hash."""
    content = _index() if path == _INDEX else path.read_bytes()
    if decompress:
        content = gzip.decompress(content)
    return content, f'"{hashlib.sha256(content).hexdigest()[:16]}"'


def _index() -> bytes:
    """Return the page's document, with the explanation methods and the scripts of extensions."""
    options: list[str] = []
    for method in methods().values():
        title = method.summary[:1].upper() + method.summary[1:]
        of_class = " data-of-class" if method.class_specific else ""
        options.append(f'<option value="{method.name}"{of_class}>{html.escape(title)}</option>')
    links: list[str] = []
    for name in _EXTENSION_FOLDERS:
        links.append(f'<link rel="stylesheet" href="page/{name}/main.css">')
        links.append(f'<script type="module" src="page/{name}/main.js"></script>')
    document = _INDEX.read_text()
    document = document.replace("<!-- methods -->", "".join(options))
    return document.replace("<!-- extensions -->", "\n".join(links)).encode()


for _url in _FILES:
    router.get(_url)(file)
