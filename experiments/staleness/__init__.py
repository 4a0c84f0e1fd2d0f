"""What staleness costs and what the corrections are worth, on a model small enough for a laptop.

    python -m experiments.staleness.study     the runs, the table, the plots and the page; two hours, resumable

`task` running sums; `warmup` the model; `study` which runs; `findings` what they say.
"""
