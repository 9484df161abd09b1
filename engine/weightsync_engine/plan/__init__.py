"""Pure: the reshard compiler, its plan in M2N's terms, a reference executor and the envelope check."""
