"""Rollout: generation that never waits for training.

`worker`    the process: tickets in, chunks and outcomes out, weights in between
`streamer`  what of a trajectory has been sent, and when to send more
`engines`   vLLM and a small torch engine behind one protocol
"""
