"""The versioned replay buffer: the one owner of every ticket, every token, every lease and the prompt cursor.

`core`        the state machine: events in, messages out; no I/O, no clock
`records`     what the core keeps: trajectories, groups, leases
`pool`        columnar storage of the tokens of live trajectories
`appends`     which chunks of a message are stored
`sampler`     which groups a batch holds
`messages`    what goes on the wire
`server`      the core on a ZeroMQ ROUTER socket
`client`      the other end, for workers, learner ranks and the feeder
`dump`        a file with everything the buffer holds, and how to read it
`config`      the part of the configuration that this package owns
"""
