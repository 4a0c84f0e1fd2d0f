"""Rewards: a function of a response and its data row, run in a child process that is killed at its limit.

`functions`  rewards that ship with the project
`child`      the child process
`runner`     the parent's side: limits, restarts
"""
