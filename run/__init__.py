"""One run, between its steps: its state, how it starts, resumes and ends, its folder, its logs, its
evaluations, its summary.
"""
