"""A run's folder as the page sees it, while the run goes on or after it: read only, and nothing outside the folder.

folder.py     the files that are read
following.py  metrics and events as they grow
view.py       what the page asks of a run
api.py        its endpoints
"""
