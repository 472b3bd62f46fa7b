"""trigrid: plan, prove and run 3D-parallel training of large language models.

Importing the package imports neither torch nor numpy.
"""

__version__ = "0.1.0"
