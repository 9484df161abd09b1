"""Messages and the pure round state machine: no torch, and the only part of the engine that the operator imports."""
