import torch as th
from hypothesis import settings

# The first example of a test pays for imports and caches: a deadline would measure the machine
settings.register_profile("ours", deadline=None)
settings.load_profile("ours")

# Small networks; threads would only wait for each other, and for the other tests
th.set_num_threads(1)
