"""The developer's surface: `App` turns functions into pipelines of one step, and submits them. No engine of its own."""
