"""The parts that compute: rollout workers, the learner, what lies between them, and what is reported.

`rollout`     worker process, chunk streamer, generation engines
`rewards`     reward functions in child processes
`data`        prompts
`learner`     packing, log-probabilities, FSDP2 step, checkpoints
`algorithms`  advantages and losses, pure
`weights`     publication of new weights and their receipt
`tracking`    metrics, MLflow, timeline, report
`config`      the whole configuration tree
"""
