"""In the place of torchvision, whose wheel fails beside a torch without CUDA.

It has the names that SGLang and transformers import when they start; models of text use none.
"""

__version__ = "0"
