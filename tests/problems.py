"""Problem documents, the body of every refusal."""

import json
from collections.abc import Mapping


def code_of(status: int, headers: Mapping[str, str], body: bytes) -> str:
    """Return the problem code; the answer must be a complete problem document."""
    assert headers["content-type"] == "application/problem+json"
    document = json.loads(body)
    assert set(document) == {"type", "title", "status", "detail", "code", "request_id"}
    assert document["status"] == status
    assert "\n" not in document["detail"]
    assert document["request_id"] == headers["x-request-id"]
    code: str = document["code"]
    return code
