"""Policy versions, the staleness bound and what corrects for the difference. Pure: no I/O, no clock.

`versions`     the pair (incarnation, step) as one int64, and the lineage after restores
`bounds`       ages of tokens, admission, what happens to a stale trajectory
`corrections`  importance weights and masks (torch)
`proximal`     the trust-region anchor of decoupled losses (torch)
`monitor`      age histograms, effective sample size, ratio statistics
`config`       the part of the configuration that this package owns
"""
