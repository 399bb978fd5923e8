pytest_plugins = ["tests.support.nats", "tests.support.processes", "tests.support.database", "tests.support.providers"]
