"""Control core and admin listener that switch speculative decoding in a live engine."""
