from hypothesis import settings

# Examples share two cores with servers and other tests: how long one takes says nothing.
settings.register_profile("core", deadline=None)
settings.load_profile("core")
