"""The Open Inference Protocol over gRPC, on a port of its own in each web worker's process and
event loop.

    caller -- HTTP/2 --> grpcio       frames, flow control, limits
                         calls.py     id, key, metrics, log line, errors as gRPC's status codes; the methods
                         messages.py  messages, bounded, as what `service.extensions.inference_protocol` reads and writes

What a request may be and what becomes of it is decided in `service.extensions.inference_protocol` and
`service.web.picture`, as over HTTP. Nothing here is imported unless `VIT_GRPC_PORT` is set: it
needs the extra `grpc`.
"""

import os

# The library would write lines of its own, in a form of its own, about whatever its callers do
# wrong.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
