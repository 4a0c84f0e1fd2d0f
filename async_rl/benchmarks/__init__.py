"""How fast the buffer is on this machine, and how its peers do the same work: `async-rl bench buffer`.

`buffer` measures and reports; `load` is one process that plays worker, feeder and learner; `server` is the buffer's
process under test; `peers` are the baselines (Ray actor, Ray queue, TransferQueue); `machine` says where it ran.
"""
