"""The Open Inference Protocol over gRPC, on its own port, in each web process's event loop.

    client -- HTTP/2 --> grpcio       frames, flow control, limits
                         server.py    listeners, options, handlers
                         calls.py     id, key, metrics, log line, errors as status codes
                         methods.py   the methods, with `call.py` for one call
                         messages.py  bounded messages, to and from `tensors`
                         health.py, reflection.py  the standard services
                         descriptors.py  the classes of the messages

The folder `proto` declares all messages and services. `make protocol` compiles it to
`services.binpb`, from which protobuf builds the classes at run time: no module is generated.

The modules above this package check and compute requests, like over HTTP. Nothing imports this
package unless `VIT_GRPC_PORT` is set, because it needs the extra `grpc`.
"""

import os

# Otherwise grpcio would log errors of clients itself, in its own format.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
