"""HTTP without our subject: the edge, problems, routes, documents. Imports no endpoint."""
