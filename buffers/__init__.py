"""The versioned replay buffer: the one owner of every ticket, every token, every lease and the place in the prompts.

`core`        the state machine: messages in, messages out; no I/O, no clock
`issuing`     its rollout side: prompts, tickets, chunks, outcomes, deaths
`offering`    its learner side: groups on offer, leases, what is kept after a commit
`groups`      when a group is offered, and what a failed member does
`store`       what both sides share; `records` and `pool`: trajectories, groups, and the tokens in columns
`appends`     which chunks of a message are stored
`sampler`     which groups a batch holds
`messages`    what goes on the wire
`snapshot`    the whole state as one message
`journal`     every accepted message on disk; `segments`: its files, and the way back
`server`      the core on a ZeroMQ socket, with its journal; `liveness`: who has been silent for too long
`client`      the other end, for workers, learner ranks and the feeder; `session`: what a worker says again
`keys`        encryption and admission
`inspect`, `verify`, `export`   tools on a journal
`config`      the part of the configuration that this package owns
"""
