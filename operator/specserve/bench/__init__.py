"""A closed-loop benchmark of speculation: the same load with it on, off and left to the engine.

`plan` says which cells are measured in which order, `prompts` what is asked, `dialects` how the
three HTTP routes ask it and answer, `figures` what the answers amount to: all four are pure.
`client` sends, `steering` switches a live engine and puts it back, `runner` runs a plan, and
`report` and `plot` show the outcome. `command` is the command line.
"""
