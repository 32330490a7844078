"""In the place of IPython, which SGLang imports for notebooks."""
