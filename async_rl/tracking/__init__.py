"""What a run leaves behind and shows.

`metrics`     one JSON line per learner step
`timeline`    busy intervals per process, Chrome trace, overlap
`mlflow_log`  the same metrics in MLflow, never in the way
`display`     live table on a terminal, plain lines elsewhere
`summary`     summary.json and the last table
`plot`        reward.png
"""
