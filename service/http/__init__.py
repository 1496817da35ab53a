"""HTTP/1.1 over sockets: a connection parses requests, and each request is a task.

    socket --bytes--> HttpConnection --headers, body--> Exchange --receive--> the application
    socket <--bytes-- HttpConnection <----------------- Exchange <---send---- the application

httptools parses request headers. This package bounds the headers, the framing, the time,
unread answers, and the number of connections. The application bounds the bodies. It also writes the
problem document that answers an invalid request. A pipelined request waits unparsed until the
answer before it is complete.

For the reasons to have our own protocol, see docs/decisions/own-http-protocol.md.
"""
