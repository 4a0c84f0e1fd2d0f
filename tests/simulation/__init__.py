"""The real core, sessions, feeder and journal logic under a simulated clock, network and disk, all from one seed.

`disk`      a journal in memory that loses what was not synced
`net`       delays, loses, duplicates and reorders messages
`parts`     server, workers, feeder and learner: the real protocol, time simulated
`world`     one run from a seed: faults, and the invariants checked after every event
`mutations` deliberate bugs that the simulation must find
`replay`    `python -m tests.simulation.replay SEED`, and many seeds at once
"""
