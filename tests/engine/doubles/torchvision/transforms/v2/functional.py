"""Names of torchvision's second functions."""

from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]
