"""One request's way: HTTP protocol, middleware, admission, upload, pipeline, routes."""
