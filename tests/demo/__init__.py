"""The demo: speculation switched off and on in live pods, beside pods pinned on and pinned off.

Three SpecServes, equal but for `policy.mode`, take the same load at the same moment on one
cluster. The engines are simulated; everything else is real.
"""
