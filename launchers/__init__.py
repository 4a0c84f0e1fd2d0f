"""Ways to start a run, and the command line.

`cli`         `async-rl`: every command, its help, its errors
`local`       a run on this machine, start to summary
`supervisor`  the life of the processes of a run
`feeder`      prompts to the buffer, on its credit
`folders`     run folders and their locks
`devices`     which cores or GPUs a process gets
`doctor`      what is installed and what works here
"""
