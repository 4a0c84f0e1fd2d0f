"""Proof of what the project claims: runs, their bars, and the figures as JSON."""
