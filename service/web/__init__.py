"""The path of a request: middleware, admission, body, picture, routes."""
