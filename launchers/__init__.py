"""Ways to start a run, and the command line.

`cli`         `async-rl`: every command, its help, its errors
`local`       a run, start to summary; on this machine or the host it is given
`supervisor`  the life of the processes of a run
`hosts`       where processes live; `ray_host`, `ray_run`: on a Ray cluster
`launch_files` a Slurm script and a KubeRay manifest
`pools`       growing and shrinking while a run goes on
`health`      processes that live and do nothing
`feeder`      prompts to the buffer, on its credit
`folders`     run folders and their locks
`devices`     which cores or GPUs a process gets
`doctor`      what is installed and what works here
"""
