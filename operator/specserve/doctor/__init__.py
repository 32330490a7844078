"""What makes speculation lose on a live server, as a checklist.

`gather` asks the server, `evidence` holds what came back, `checks` judges it: pure, and silent
about what cannot be seen. `command` is the command line.
"""
