"""A contract server of the protocol that the tinker SDK speaks; see `server`."""
