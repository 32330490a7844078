"""SpecServe: keeps speculative decoding on exactly while it pays."""
