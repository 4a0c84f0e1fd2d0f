"""Prompts: where they come from, how they are rendered, and in which order they are given out.

`sources`   rows from files, data set folders and reasoning-gym tasks
`prompts`   the prepared prompts of a run: tokens and rows, in files that the feeder maps
`prepare`   renders and tokenizes once, before the start
"""
