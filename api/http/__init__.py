"""HTTP for every endpoint: the middleware, problems, kinds of routes, the OpenAPI document. Imports no endpoint."""
