pytest_plugins = [
    "tests.support.strict",
    "tests.support.processes",
    "tests.support.nats",
    "tests.support.client",
    "tests.support.beds",
    "tests.support.database",
    "tests.support.providers",
    "tests.support.api",
    "tests.support.deployment",
    "tests.support.production",
    "tests.support.stage",
    "tests.support.servers",
]
