"""The container's health check: exit code 0 when the service on this machine is ready, else 1 and the reason.

Readiness and not mere life, as `docker compose up --wait`, `depends_on: service_healthy` and proxies that
read a container's health all ask whether it can be given work.
"""

import http.client
import os
import sys


def main() -> str | None:
    """Ask /readyz.

    Returns:
        None when ready, else why not.
    """
    # http.client, as urllib.request would send this through a proxy that the environment names.
    connection = http.client.HTTPConnection("127.0.0.1", int(os.environ.get("VIT_PORT", "8000")), timeout=4)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        body = answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return f"/readyz: {error}"
    return None if answer.status == http.client.OK else f"/readyz: {answer.status} {body}"


if __name__ == "__main__":
    sys.exit(main())
