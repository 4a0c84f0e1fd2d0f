"""The weights' own plane: from the learner's parameters into running engines.

    learner: Publisher.publish(version, tensors) ──shared memory──▶ worker: engine.update(manifest)
                        └── WeightsServer ──network──▶ WeightsClient ──shared memory──▶ worker on another host

`manifest`       what was published: names, shapes, checksums, probe; torch-free
`shm`            POSIX shared memory, one writer, any number of readers on the same host
`delta`          what changed between two versions, exactly
`wire`           what `server` and `client` say to each other
`server`         beside the learner: serves what is in shared memory to other hosts
`client`         beside a worker: brings versions into shared memory of its host
`transport`      which of these a run uses
`publisher`      the learner's side
`receiver`       the worker's side: newest version, proof of receipt
`vllm_backend`   the receiving end inside a vLLM engine process
`vllm_plugin`    registers it with vLLM
"""
