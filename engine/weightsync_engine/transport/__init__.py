"""How the bytes of a plan's steps travel, and the store through which ranks agree before they do."""
