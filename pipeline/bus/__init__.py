"""The bus: the few operations on a durable log that everything else needs, over NATS JetStream or in memory."""
