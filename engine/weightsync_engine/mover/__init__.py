"""The mover: the process beside each rank that owns the communicator. Parent's, driver's and its own side."""
