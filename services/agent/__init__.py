"""Tools for agents: `lachesis mcp`."""
