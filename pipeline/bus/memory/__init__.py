"""The bus in memory: streams, consumers and requests of one process, for tests and `lachesis dev`."""
