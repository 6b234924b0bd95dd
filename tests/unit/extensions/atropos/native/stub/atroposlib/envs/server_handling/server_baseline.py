"""A stand-in for the module of atroposlib 0.4.0 of this name: what `child` touches of it, and no more."""


class APIServerConfig:
    def __init__(self, **fields):
        self.__dict__.update(fields)


class APIServer:
    def __init__(self, config, reasoning_config=None):
        self.config = config
        self.server_healthy = True
