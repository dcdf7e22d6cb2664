"""Runs that a cluster's scheduler starts: what is asked for, the batch script, and what became of it.

Nothing here schedules: SLURM does, and this package writes its scripts and reads its answers.
"""
