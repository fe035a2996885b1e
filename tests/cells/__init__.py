"""Several installations that share the tenants among them."""
