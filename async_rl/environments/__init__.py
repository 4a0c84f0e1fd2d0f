"""Environments: what answers a policy between its turns.

`protocol`    what an environment is, and how one is found by name
`calculator`  two turns: an expression, its value, the answer
"""
