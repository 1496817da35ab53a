"""HTTP/1.1 over sockets: connections, heads, framing, bounds, draining. No route and no document is known here.

The application meets a connection in one `Exchange` a request; a server needs an `Application`.
"""
