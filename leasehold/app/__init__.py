"""What a user's program imports: `App` turns functions into pipelines of one step, and submits runs of them. Workers
run them as they run every other pipeline.
"""
