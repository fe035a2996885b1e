"""The pipeline `webhook`: one job delivers one message to a client's webhook."""
