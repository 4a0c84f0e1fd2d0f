"""Studies that can be run again, with their results."""
