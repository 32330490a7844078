"""What SGLang imports where it has no kernel of its own."""

rotary_embedding = None
