"""At home in other people's loops: transformers' Trainer, Accelerate, Lightning.

On one rank they take :class:`anychip.train.zero.Optimizer` as any of torch's. With several ranks
each wraps the model in DistributedDataParallel, which would average gradients once more and cannot
see weights of which a rank has a part; the classes here leave the model as it is. What each takes
and refuses: docs/integrations.md. A module imports its framework, and nothing here imports another.
"""
