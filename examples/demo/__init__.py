"""`make demo`: three versions of a model's weights arrive in two real vLLM servers inside a real cluster."""
