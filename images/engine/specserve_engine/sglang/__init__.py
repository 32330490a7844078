"""The plugin of SGLang: what joins the control core to an unmodified SGLang wheel.

SGLang loads `plugin.register` in each of its processes through the entry point group
`sglang.srt.plugins`. In the scheduler processes, `agent` puts `policy` in front of the engine's
own step policy and obeys the orders that arrive on `/set_internal_state`'s path (`message`). In
the HTTP process, `host` runs the admin listener and carries its orders there (`ranks`).

No module here imports SGLang: all that is used of it is named in `upstream`, and looked up and
checked when the plugin starts.
"""
