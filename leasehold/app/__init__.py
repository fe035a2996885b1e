"""What a user's program imports: `App` turns functions into pipelines of one step, and submits runs of these pipelines.
Workers execute these runs like all other runs.
"""
