"""The path of a request: HTTP protocol, middleware, admission, upload, request, routes."""
