pytest_plugins = ["tests.support.processes", "tests.support.nats", "tests.support.database", "tests.support.providers"]
