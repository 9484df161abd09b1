"""The command `weightsync`: what a user asks before, and without, a cluster."""
