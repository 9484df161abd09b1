"""The agent, one for each pod: all that the operator talks to. HTTP outside, the session machine inside."""
