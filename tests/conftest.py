pytest_plugins = ["tests.support.nats", "tests.support.processes"]
