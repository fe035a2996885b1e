"""The testing kit of an App, and the pytest plugin that offers it (`pip install 'leasehold[testing]'`)."""
