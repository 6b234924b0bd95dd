"""Pure rules of the recording endpoint."""
