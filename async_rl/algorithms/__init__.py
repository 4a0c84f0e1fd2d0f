"""Advantages and losses, as pure functions.

`advantages`  from the rewards of a group to one number per trajectory
`losses`      from log-probs and advantages to the scalar that is minimised
"""
