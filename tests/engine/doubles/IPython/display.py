"""What SGLang imports when it starts."""

HTML = display = None
