"""`dex study`: variants × seeds on identical data, order and budget, and what their differences are worth.

study_file.py   the YAML file
jobs.py         the runs that a study consists of
sweep.py        each variant's learning rate
work.py         one run, in a process of its own
verb.py         the order of it all; several `dex study` on one output share the runs
outcome.py      what the runs came to
differences.py  paired differences with intervals over items and over seeds
scaling.py      loss against parameters or tokens, and what a variant saves
report.py       report.md, report.json and the figures
"""
