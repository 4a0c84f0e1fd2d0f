"""The learner: FSDP2 ranks that take batches of bounded staleness, train, and publish.

`rank`        the process of one rank and its main loop
`batch`       what a rank trains on, and how a batch is shared out
`packing`     groups with a shared prompt, packed into rows
`policy`      the model: packed rows in, log-probs of answer tokens out
`logprobs`    log-probs and entropy without holding full logits
`step`        forward, backward, optimizer
`checkpoint`  distributed checkpoints and the Hugging Face export
"""
