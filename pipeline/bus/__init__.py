"""The bus: the operations on a durable log that all stages need.

It is implemented over NATS JetStream and in memory.
"""
