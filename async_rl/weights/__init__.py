"""The weights' own plane: from the learner's parameters into running engines.

    learner: Publisher.publish(version, tensors) ──shared memory──▶ worker: engine.update(manifest)

`manifest`       what was published: names, shapes, checksums, probe; torch-free
`shm`            POSIX shared memory, one writer, any number of readers on the same host
`publisher`      the learner's side
`receiver`       the worker's side: newest version, proof of receipt
`vllm_backend`   the receiving end inside a vLLM engine process
`vllm_plugin`    registers it with vLLM
"""
